"""An engine's processes outlive a trainer that was killed while it was starting.

They ask the kernel to be killed with their parent after their imports, when it is gone already: the scheduler goes through
its whole start, memory and all, and ends when it first answers the parent; the detokenizer waits forever.
"""

import subprocess
import sys
import time

from harness.tools.repro.case import Case
from harness.tools.repro.tiny_engine import tiny_engine

CASE = Case(
    broken="SIGKILL as soon as the engine's processes are there",
    healthy="SIGKILL once the engine is up",
    signature=(r"still there after \d+ s: \d+ of 2",),
    failure="teardown-orphans",
    engine=True,
    on_gpu=True,
)
SECONDS = 8


def program(broken: bool) -> None:
    import psutil

    from harness.runtime.processes import is_alive

    def spawned() -> list[psutil.Process]:  # the scheduler and the detokenizer, under the name of spawn or of SGLang
        commands = {each: " ".join(each.cmdline()) for each in psutil.Process(trainer.pid).children(recursive=True)}
        return [each for each, words in commands.items() if "spawn_main" in words or words.startswith("sglang::")]

    if sys.argv[3:] == ["trainer"]:
        with tiny_engine():
            sys.stdin.read()
        return
    command, pipe = [sys.executable, *sys.argv, "trainer"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as trainer:
        assert trainer.stdout is not None
        if not broken:
            next(line for line in trainer.stdout if "the engine is up" in line)
        while len(started := spawned()) < 2:
            time.sleep(0.1)
        trainer.kill()
        trainer.wait()
        time.sleep(SECONDS)
        left = sum(map(is_alive, started))
        print(f"still there after {SECONDS} s: {left} of {len(started)}" if left else "all are gone", flush=True)
