"""A second release in a row ends the scheduler in the memory saver."""

from harness.tools.repro.case import Case
from harness.tools.repro.tiny_engine import tiny_engine

CASE = Case(
    needs="one_gpu",
    broken="release, release, resume",
    healthy="release, resume",
    signature=(r"Cannot pause allocation that is not active|func=pause\b|an illegal memory access was encountered",),
    failure="double-resume-or-release",
    requires=("torch_memory_saver",),
    engine=True,
)


def program(broken: bool) -> None:
    with tiny_engine() as engine:
        for _ in range(2 if broken else 1):
            engine.release()
        engine.resume()
        engine.generate()
