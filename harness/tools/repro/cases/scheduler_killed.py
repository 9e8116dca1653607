"""A scheduler is killed, as the out-of-memory killer does: SGLang then SIGKILLs the process that built the engine, which
vanishes without a word of its own."""

import os
import signal

from harness.tools.repro import variant
from harness.tools.repro.case import Case
from harness.tools.repro.engine import tiny_engine

CASE = Case(
    title="when a scheduler is killed, SGLang kills the process that built the engine",
    needs="cpu",
    broken="SIGKILL to the scheduler",
    healthy="signal 0, which does nothing",
    signature=(
        r"[Ss]ubprocess \S*scheduler\S* .*(crashed|died|exit)|[Ss]cheduler.*(died|crashed|exit)",
        r"[Rr]eceived sigquit|SIGQUIT",
    ),
    failure="peer-vanished",
    engine=True,
    seconds=420,
)


def program(broken: bool) -> None:
    import psutil

    with tiny_engine() as engine:
        engine.generate()
        schedulers = [p for p in psutil.Process().children(recursive=True) if "scheduler" in p.name()]
        print("schedulers:", [each.name() for each in schedulers], flush=True)
        os.kill(schedulers[0].pid, signal.SIGKILL if broken else 0)
        engine.generate()  # waits for an answer that never comes, until SGLang ends it


if __name__ == "__main__":
    variant.main(program)
