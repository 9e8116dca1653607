"""A trainer is killed while its engine starts. The engine's processes ask the kernel to be ended with their parent after
their imports, and by then it is gone: the scheduler goes through its whole start, memory and all, and ends at its first
word to the parent; the detokenizer waits for ever."""

import subprocess
import sys
import time

from harness.tools.repro import variant
from harness.tools.repro.case import Case
from harness.tools.repro.engine import tiny_engine

CASE = Case(
    title="an engine's processes outlive a trainer that was killed while it was starting",
    needs="cpu",
    broken="SIGKILL as soon as the engine's processes are there",
    healthy="SIGKILL once the engine is up",
    signature=(r"still there after \d+ s: \d+ of 2",),
    failure="teardown-orphans",
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
    command = [sys.executable, "-m", "harness.tools.repro.cases.orphans_of_a_start", sys.argv[1], "trainer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        if not broken:
            next(line for line in trainer.stdout if "the engine is up" in line)
        while len(started := spawned(psutil.Process(trainer.pid))) < 2:
            time.sleep(0.1)
        trainer.kill()
        trainer.wait()
        time.sleep(SECONDS)
        left = sum(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in started)
        print(f"still there after {SECONDS} s: {left} of {len(started)}" if left else "all are gone", flush=True)


def spawned(trainer: "psutil.Process") -> "list[psutil.Process]":  # type: ignore[name-defined]  # noqa: F821
    """The scheduler and the detokenizer, whatever they call themselves by then."""
    return [each for each in trainer.children(recursive=True) if is_spawned(each)]


def is_spawned(process: "psutil.Process") -> bool:  # type: ignore[name-defined]  # noqa: F821
    words = " ".join(process.cmdline())
    return "spawn_main" in words or words.startswith("sglang::")


if __name__ == "__main__":
    variant.main(program)
