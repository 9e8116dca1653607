"""Which processes do nothing, seen from outside: real ones that sleep, work, and wake now and then."""

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from harness.tools.watchdog.stacks import Stack
from harness.tools.watchdog.stuck import said_still, still

HANGS = "print(flush=True); import time; time.sleep(60)"
WORKS = "print(flush=True)\nwhile True: pass"
WAKES = "print(flush=True); import time\nwhile True: time.sleep(0.1)"


@pytest.fixture
def processes() -> Iterator[dict[str, psutil.Process]]:
    made = {
        code: subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
        for code in (HANGS, WORKS, WAKES)
    }
    for process in made.values():
        assert process.stdout
        process.stdout.readline()
    while psutil.Process(made[HANGS].pid).status() != psutil.STATUS_SLEEPING:
        time.sleep(0.01)
    yield {code: psutil.Process(process.pid) for code, process in made.items()}
    for process in made.values():
        process.kill()
        process.communicate()


def test_only_what_does_nothing_is_named_with_its_stack(processes: dict[str, psutil.Process]) -> None:
    by_pid = {process.pid: process for process in processes.values()}
    hangs = processes[HANGS].pid
    assert still(by_pid) == [hangs]
    stack = Stack(name=f"python-{hangs}", text="", frames=("sleep (a.py:1)", "main (a.py:9)", "f"), waits=False)
    (line,) = said_still([hangs], by_pid, [stack])
    assert line.endswith(f"(pid {hangs}) in sleep (a.py:1) < main (a.py:9)")
    assert said_still([], by_pid, [stack]) == []
