"""A release drops what the weights hold, by design; after the resume the memory is there, and nothing is in it."""

from harness.tools.repro import variant
from harness.tools.repro.case import Case, Number
from harness.tools.repro.engine import checkpoint, tiny_engine

CASE = Case(
    title="an engine that was resumed and not updated generates with weights that nobody wrote",
    needs="one_gpu",
    broken="release, resume, generate",
    healthy="release, resume, update, generate",
    number=Number(name="mean log-prob difference", broken_above=0.1, healthy_below=0.05),
    requires=("torch_memory_saver",),
    engine=True,
    seconds=150,
)


def program(broken: bool) -> None:
    with tiny_engine() as engine:
        trainer = engine.trainer(seed=0)  # what the engine was started with
        engine.release()
        engine.resume()
        if not broken:
            engine.update(checkpoint(trainer))
        engine.print_difference(trainer)


if __name__ == "__main__":
    variant.main(program)
