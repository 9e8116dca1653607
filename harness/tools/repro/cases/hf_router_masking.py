"""Which experts a tiny DeepSeek-V3 of transformers picks where all correction biases are negative, against the formula:
the best experts of the best group. Groups that lost used to be masked with 0, which is more than a negative score."""

from harness.tools.repro import variant
from harness.tools.repro.case import Case

CASE = Case(
    title="transformers lets experts of groups that lost win, where biases are negative",
    needs="cpu",
    broken="correction biases of -2",
    healthy="correction biases of +2",
    signature=(r"of [1-9]\d* tokens: experts outside of the best group",),
    requires=("transformers>=4.53",),
)
TOKENS = 64


def program(broken: bool) -> None:
    from harness.rollout.cpu.activate import activate

    activate()  # transformers imports torchvision
    import torch

    from harness.task.tiny_models import tiny_config, tiny_model

    config = tiny_config("deepseek_v3")
    block = tiny_model(config, seed=0).model.layers[1].mlp
    hidden = torch.randn(1, TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        block.gate.e_score_correction_bias.fill_(-2.0 if broken else 2.0)
        scores = torch.nn.functional.linear(hidden[0].float(), block.gate.weight.float()).sigmoid()
        picked = experts(block, hidden)
    biased = (scores + block.gate.e_score_correction_bias).view(TOKENS, config.n_group, -1)
    best_group = biased.topk(2).values.sum(-1).argmax(-1)
    outside = (picked // biased.shape[-1] != best_group[:, None]).any(-1).sum().item()
    print(f"of {outside} tokens: experts outside of the best group ({TOKENS} tokens in all)")


def experts(block: object, hidden: object) -> "torch.Tensor":  # type: ignore[name-defined]  # noqa: F821
    """int [tokens, top_k]; transformers 5 splits the gate in two, before it answers (experts, weights)."""
    routed = block.gate(hidden)  # type: ignore[attr-defined]
    if hasattr(block, "route_tokens_to_experts"):
        routed = block.route_tokens_to_experts(routed[0] if isinstance(routed, tuple) else routed)
    return next(each for each in routed if not each.is_floating_point())


if __name__ == "__main__":
    variant.main(program)
