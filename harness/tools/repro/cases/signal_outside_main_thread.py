"""An engine cannot be built outside of the main thread.

Asynchronous trainers do. Releases until 0.5.9 set their signal handlers regardless.
"""

import threading

from harness.tools.repro.case import Case
from harness.tools.repro.tiny_engine import tiny_engine

CASE = Case(
    broken="the engine is built in a threading.Thread",
    healthy="it is built in the main thread",
    signature=(r"signal only works in main thread of the main interpreter",),
    engine=True,
)


def program(broken: bool) -> None:
    def build() -> None:
        with tiny_engine():
            pass

    if not broken:
        build()
        return
    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
