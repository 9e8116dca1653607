"""Weights sent from named_parameters() leave e_score_correction_bias behind.

DeepSeek-V3's router has it as a buffer. A receiver with another bias routes otherwise, without an error.
"""

from harness.tools.repro.case import Case, Number

CASE = Case(
    broken="model.named_parameters() is sent",
    healthy="model.state_dict() is sent",
    signature=(r"not sent: \S*e_score_correction_bias",),
    number=Number(name="mean log-prob difference", broken_above=0.01, healthy_below=1e-5),
)


def program(broken: bool) -> None:
    import torch

    from harness.task.tiny_models import tiny_config, tiny_model

    config = tiny_config("deepseek_v3")
    trainer, receiver = tiny_model(config, seed=1), tiny_model(config, seed=0)
    sent = dict(trainer.named_parameters()) if broken else trainer.state_dict()
    for name in sorted(set(trainer.state_dict()) - set(sent)):
        print(f"not sent: {name}")
    receiver.load_state_dict(sent, strict=False)
    tokens = torch.arange(2, 130)[None]
    with torch.no_grad():
        theirs, ours = (model(tokens).logits.log_softmax(-1) for model in (receiver.eval(), trainer.eval()))
    print(f"mean log-prob difference: {(theirs - ours).abs().mean().item():.3e}")
