"""A tensor that was not sent keeps its old weights, and the update answers success."""

from harness.tools.repro.case import Case
from harness.tools.repro.tiny_engine import LOG_PROBS, checkpoint_tensors, tiny_engine

CASE = Case(
    broken="all tensors but one are sent",
    healthy="all tensors are sent",
    number=LOG_PROBS,
    engine=True,
)
MISSING = "model.layers.1.mlp.down_proj.weight"


def program(broken: bool) -> None:
    with tiny_engine() as engine:
        trainer = engine.trainer(seed=1)
        engine.update(
            [(name, tensor) for name, tensor in checkpoint_tensors(trainer) if not (broken and name == MISSING)]
        )
        engine.print_difference(trainer)
