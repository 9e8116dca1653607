"""An update from which one tensor is missing: the engine answers success and computes with the old one."""

from harness.tools.repro import variant
from harness.tools.repro.case import Case, Number
from harness.tools.repro.engine import checkpoint, tiny_engine

CASE = Case(
    title="a tensor that was not sent keeps its old weights, and the update answers success",
    needs="cpu",
    broken="all tensors but one are sent",
    healthy="all tensors are sent",
    number=Number(name="mean log-prob difference", broken_above=0.1, healthy_below=0.05),
    engine=True,
    seconds=420,
)
MISSING = "model.layers.1.mlp.down_proj.weight"


def program(broken: bool) -> None:
    with tiny_engine() as engine:
        trainer = engine.trainer(seed=1)
        engine.update([(name, tensor) for name, tensor in checkpoint(trainer) if not (broken and name == MISSING)])
        engine.print_difference(trainer)


if __name__ == "__main__":
    variant.main(program)
