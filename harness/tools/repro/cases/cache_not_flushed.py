"""An update without a flush leaves the prefix cache of the old weights, which serves the same prompt again."""

from harness.tools.repro.case import Case, Number
from harness.tools.repro.tiny_engine import checkpoint_tensors, tiny_engine

CASE = Case(
    broken="flush_cache=False",
    healthy="flush_cache=True",
    number=Number(name="cached tokens after the update", broken_above=0.5, healthy_below=0.5),
    engine=True,
)


def program(broken: bool) -> None:
    with tiny_engine() as engine:
        engine.generate()
        trainer = engine.trainer(seed=1)
        engine.update(checkpoint_tensors(trainer), flush_cache=not broken)
        print("cached tokens after the update:", engine.generate()["meta_info"]["cached_tokens"], flush=True)
