"""A MoE model's experts keep their old weights if tensors are sent under their names in memory.

transformers 5 fuses experts in memory (experts.gate_up_proj). SGLang ignores such names, and answers success.
"""

from harness.tools.repro.case import Case
from harness.tools.repro.tiny_engine import LOG_PROBS, checkpoint_tensors, tiny_engine

CASE = Case(
    broken="names as model.state_dict() has them",
    healthy="names as save_pretrained() writes them",
    number=LOG_PROBS,
    engine=True,
    on_gpu=True,
)


def program(broken: bool) -> None:
    with tiny_engine("qwen3_moe") as engine:
        trainer = engine.trainer(seed=1)
        engine.update(list(trainer.state_dict().items()) if broken else checkpoint_tensors(trainer))
        engine.print_difference(trainer)
