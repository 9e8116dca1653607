"""resume_memory_occupation on an engine that is resumed. Older releases did nothing, or failed in the memory saver."""

from harness.tools.repro import variant
from harness.tools.repro.case import Case
from harness.tools.repro.engine import tiny_engine

CASE = Case(
    title="a resume without a release before it kills the scheduler",
    needs="cpu",
    broken="resume",
    healthy="release, then resume",
    signature=(
        r"KeyError: '(weights|kv_cache)'|CUresult error\s+result=1|Cannot resume allocation that is not paused",
    ),
    engine=True,
    seconds=420,
)


def program(broken: bool) -> None:
    with tiny_engine() as engine:
        if not broken:
            engine.release()
        engine.resume()
        engine.generate()


if __name__ == "__main__":
    variant.main(program)
