"""A scheduler is killed, and SGLang kills the process that built the engine.

The out-of-memory killer does so. The process vanishes without an error of its own.
"""

import os
import signal

from harness.tools.repro.case import Case
from harness.tools.repro.tiny_engine import tiny_engine

CASE = Case(
    broken="SIGKILL to the scheduler",
    healthy="signal 0, which does nothing",
    signature=(
        r"[Ss]ubprocess \S*scheduler\S* .*(crashed|died|exit)|[Ss]cheduler.*(died|crashed|exit)",
        r"[Rr]eceived sigquit|SIGQUIT",
    ),
    failure="peer-vanished",
    engine=True,
)


def program(broken: bool) -> None:
    import psutil

    with tiny_engine() as engine:
        engine.generate()
        schedulers = [p for p in psutil.Process().children(recursive=True) if "scheduler" in p.name()]
        print("schedulers:", [each.name() for each in schedulers], flush=True)
        os.kill(schedulers[0].pid, signal.SIGKILL if broken else 0)
        engine.generate()  # waits for an answer that never comes, until SGLang ends it
