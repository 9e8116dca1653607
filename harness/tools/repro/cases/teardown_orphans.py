"""Schedulers outlive a trainer that was killed, and hold their memory."""

import subprocess
import sys
import time

from harness.tools.repro.case import Case
from harness.tools.repro.tiny_engine import tiny_engine

CASE = Case(
    broken="SIGKILL to the process that built the engine",
    healthy="it shuts the engine down",
    signature=(r"still there after \d+ s: .*scheduler",),
    engine=True,
    on_gpu=True,
)
SECONDS = 8


def program(broken: bool) -> None:
    import psutil

    from harness.runtime.processes import is_alive

    if sys.argv[3:] == ["trainer"]:
        with tiny_engine():
            sys.stdin.read()
        return
    command, pipe = [sys.executable, *sys.argv, "trainer"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as trainer:
        assert trainer.stdout is not None and trainer.stdin is not None
        for line in trainer.stdout:
            print(line, end="", flush=True)
            if "the engine is up" in line:
                break
        started = psutil.Process(trainer.pid).children(recursive=True)
        names = {process.pid: process.name() for process in started}
        print("the engine's processes:", *names.values())
        if broken:
            trainer.kill()
        else:
            trainer.stdin.close()
        trainer.wait()
        time.sleep(SECONDS)
        left = [names[each.pid] for each in started if is_alive(each)]
        print(f"still there after {SECONDS} s:" if left else "all are gone", *left, flush=True)
