"""A trainer with an engine is killed; the engine's schedulers live on, and hold their memory."""

import subprocess
import sys
import time

from harness.tools.repro import variant
from harness.tools.repro.case import Case
from harness.tools.repro.engine import tiny_engine

CASE = Case(
    title="schedulers outlive a trainer that was killed",
    needs="cpu",
    broken="SIGKILL to the process that built the engine",
    healthy="it shuts the engine down",
    signature=(r"still there after \d+ s: .*scheduler",),
    engine=True,
    on_gpu=True,
    seconds=420,
)
SECONDS = 8


def program(broken: bool) -> None:
    import psutil

    if sys.argv[2:] == ["trainer"]:
        with tiny_engine():
            sys.stdin.read()
        return
    command = [sys.executable, "-m", "harness.tools.repro.cases.teardown_orphans", sys.argv[1], "trainer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
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
        left = [names[each.pid] for each in started if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        print(f"still there after {SECONDS} s:" if left else "all are gone", *left, flush=True)


if __name__ == "__main__":
    variant.main(program)
