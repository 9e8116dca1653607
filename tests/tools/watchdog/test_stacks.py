"""What a verdict shows of the stacks of real processes, through py-spy and their own faulthandler; and of GPUs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.runtime.failure import Failure
from harness.tools.watchdog.failures import JobView
from harness.tools.watchdog.verdict import RunVerdict

Started = tuple[int, int]
"""A pid, and what offer_own_stack() returned there."""

UNREAD = "its stack could not be read"
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
SCRIPT = """
import sys, threading, time
from harness.tools.watchdog.verdict import offer_own_stack
def hang_here():
    time.sleep(600)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print(offer_own_stack(), flush=True)
hang_here()
"""
IN_A_STORE = """
import torch.distributed as dist
from harness.cluster.network import of_all
from harness.tools.watchdog.verdict import offer_own_stack
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(offer_own_stack(), flush=True)
of_all(store, "what nobody writes", 1)
"""
NATIVE = """Process 7: python x.py
Thread 8 (idle): "guard"
    recv (libc.so.6)
Thread 7 (idle): "MainThread"
    pthread_cond_wait (libc.so.6)
    c10d::Work::wait (libtorch_cpu.so)
    all_reduce (torch/distributed/distributed_c10d.py:3252)
    wrapper (torch/distributed/c10d_logger.py:83)
    all_sum (harness/trainer/learner.py:31)
"""


@contextmanager
def started(script: str) -> Iterator[Started]:
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def shown(folder: Path, rank: tuple[int, int | None]) -> str:
    """Return what a verdict says of the stack of rank 0, the process `rank`."""
    failure = Failure(kind="deadline", time=0.0, host="host0", ranks=(0,), seconds=60.0)
    verdict = RunVerdict("host0", folder, [failure], JobView(now=0.0, world_size=1, places={}, hosts={}))
    verdict.begin_to_collect({0: rank}, {}).result()
    verdict.keep()
    return next(line.strip() for line in verdict.lines() if line.startswith("  rank 0"))


def shown_in(folder: Path, rank: Started, function: str) -> str:
    """Return the same, once the process has come to the function in which it hangs."""
    end = time.monotonic() + 60
    while f"in {function} (" not in (line := shown(folder, rank)):
        assert time.monotonic() < end, line
    return line


def may_trace() -> bool:
    """Whether the kernel surely lets this user trace its own processes, as py-spy does."""
    return os.geteuid() == 0 or not PTRACE_SCOPE.exists() or int(PTRACE_SCOPE.read_text()) == 0


def test_a_process_that_hangs_is_seen_and_one_that_is_stopped_where_pyspy_may_look(tmp_path: Path) -> None:
    with started(SCRIPT) as rank:
        assert shown_in(tmp_path, rank, "hang_here").startswith("rank 0 was in hang_here (<string>:")
        os.kill(rank[0], signal.SIGSTOP)
        line = shown(tmp_path, rank)
    # Where the kernel may forbid it, it is not known whether py-spy may look, and nobody else sees a stopped process.
    assert "hang_here" in line or (UNREAD in line and not may_trace())


def test_without_pyspy_a_rank_writes_its_own_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(SCRIPT) as rank:
        monkeypatch.setattr(sys, "executable", "/nonexistent/python")
        monkeypatch.setenv("PATH", "")
        assert shown_in(tmp_path, rank, "hang_here").startswith("rank 0 was in hang_here (<string>:")


def test_a_process_that_is_gone_has_no_stack(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert shown(tmp_path, (ended.pid, 3)) == f"rank 0: {UNREAD}"


@pytest.mark.parametrize(
    ("native", "line"),
    [
        (
            NATIVE,
            "rank 0 waits in all_reduce (torch/distributed/distributed_c10d.py:3252)"
            " < all_sum (harness/trainer/learner.py:31)",
        ),
        (
            NATIVE.replace("c10d::Work::wait", "recv").replace("torch/distributed", "x"),
            "rank 0 was in all_reduce (x/distributed_c10d.py:3252) < all_sum (harness/trainer/learner.py:31)",
        ),
    ],
)
def test_a_rank_in_a_collective_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: str, line: str) -> None:
    (tmp_path / "native").write_text(native)
    write_tool(tmp_path / "py-spy", f"cat {tmp_path}/native")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert shown(tmp_path, (7, None)) == line


def test_a_rank_that_waits_in_the_store_for_the_others_waits(tmp_path: Path) -> None:
    """No frame of torch is on its stack, because the store waits in native code."""
    with started(IN_A_STORE) as rank:
        assert shown_in(tmp_path, rank, "of_all").startswith("rank 0 waits in of_all (")


def test_gpus_are_asked_only_where_there_is_a_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    kept = tmp_path / "gpus-host0.txt"
    shown(tmp_path, (os.getpid(), None))
    assert not kept.exists()
    write_tool(tmp_path / "nvidia-smi", 'echo "$1"')
    shown(tmp_path, (os.getpid(), None))
    assert "--query-gpu=index,uuid,memory.used" in kept.read_text()


def write_tool(file: Path, command: str) -> None:
    file.write_text(f"#!/bin/sh\n{command}\n")
    file.chmod(0o755)
