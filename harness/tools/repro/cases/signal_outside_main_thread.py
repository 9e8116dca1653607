"""An engine built in a thread, as asynchronous trainers do; releases until 0.5.9 set their signal handlers regardless."""

import threading

from harness.tools.repro import variant
from harness.tools.repro.case import Case
from harness.tools.repro.engine import tiny_engine

CASE = Case(
    title="an engine cannot be built outside of the main thread",
    needs="cpu",
    broken="the engine is built in a threading.Thread",
    healthy="it is built in the main thread",
    signature=(r"signal only works in main thread of the main interpreter",),
    engine=True,
    seconds=420,
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


if __name__ == "__main__":
    variant.main(program)
