"""release_memory_occupation on an engine that sleeps already."""

from harness.tools.repro import variant
from harness.tools.repro.case import Case
from harness.tools.repro.engine import tiny_engine

CASE = Case(
    title="a second release in a row ends the scheduler in the memory saver",
    needs="one_gpu",
    broken="release, release, resume",
    healthy="release, resume",
    signature=(r"Cannot pause allocation that is not active|func=pause\b|an illegal memory access was encountered",),
    failure="double-resume-or-release",
    requires=("torch_memory_saver",),
    engine=True,
    seconds=150,
)


def program(broken: bool) -> None:
    with tiny_engine() as engine:
        for _ in range(2 if broken else 1):
            engine.release()
        engine.resume()
        engine.generate()


if __name__ == "__main__":
    variant.main(program)
