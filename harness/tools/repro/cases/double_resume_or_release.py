"""A resume without a release before it kills the scheduler.

Older releases did nothing, or failed in the memory saver.
"""

from harness.tools.repro.case import Case
from harness.tools.repro.tiny_engine import tiny_engine

CASE = Case(
    broken="resume",
    healthy="release, then resume",
    signature=(
        r"KeyError: '(weights|kv_cache)'|CUresult error\s+result=1|Cannot resume allocation that is not paused",
    ),
    engine=True,
)


def program(broken: bool) -> None:
    with tiny_engine() as engine:
        if not broken:
            engine.release()
        engine.resume()
        engine.generate()
