"""The same prompt before and after an update: with flush_cache=False its keys and values still come from the old weights."""

from harness.tools.repro import variant
from harness.tools.repro.case import Case, Number
from harness.tools.repro.engine import checkpoint, tiny_engine

CASE = Case(
    title="the prefix cache of the old weights serves prompts after an update",
    needs="cpu",
    broken="flush_cache=False",
    healthy="flush_cache=True",
    number=Number(name="cached tokens after the update", broken_above=0.5, healthy_below=0.5),
    engine=True,
    seconds=420,
)


def program(broken: bool) -> None:
    with tiny_engine() as engine:
        engine.generate()
        trainer = engine.trainer(seed=1)
        engine.update(checkpoint(trainer), flush_cache=not broken)
        print("cached tokens after the update:", engine.generate()["meta_info"]["cached_tokens"], flush=True)


if __name__ == "__main__":
    variant.main(program)
