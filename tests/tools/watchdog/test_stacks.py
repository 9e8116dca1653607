"""Stacks of real processes, through py-spy and through their own faulthandler."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.tools.watchdog import stacks
from harness.tools.watchdog.stacks import Stack, take_stacks

PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
SCRIPT = """
import sys, threading, time
from harness.tools.watchdog.stacks import offer_own_stack
def hang_here():
    time.sleep(600)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print(offer_own_stack(), flush=True)
hang_here()
"""
IN_A_STORE = """
import torch.distributed as dist
from harness.cluster.network import of_all
from harness.tools.watchdog.stacks import offer_own_stack
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


@pytest.fixture
def hanging() -> Iterator[Stack]:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield Stack(name="rank0", pid=process.pid, handler=int(process.stdout.readline()))
        process.kill()


def take_until_it_hangs(stack: Stack, function: str = "hang_here") -> None:
    """Take stacks until the process has come to the function in which it hangs."""
    end = time.monotonic() + 60
    while not (stack.frames and stack.frames[0].startswith(function)):
        assert time.monotonic() < end, stack
        stack.text = ""  # a rank is asked for its stacks only while there are none
        take_stacks([stack])


def may_trace() -> bool:
    """Whether the kernel surely lets this user trace its own processes, as py-spy does."""
    return os.geteuid() == 0 or not PTRACE_SCOPE.exists() or int(PTRACE_SCOPE.read_text()) == 0


def test_a_process_that_hangs_is_seen(hanging: Stack) -> None:
    take_until_it_hangs(hanging)
    assert not hanging.waits


def test_a_stopped_process_is_seen_where_pyspy_may_look(hanging: Stack) -> None:
    take_until_it_hangs(hanging)
    hanging.text = ""
    os.kill(hanging.pid, signal.SIGSTOP)
    take_stacks([hanging])
    if may_trace():
        assert "hang_here" in hanging.text
    else:  # whether py-spy may look is not known, and without it nobody sees a stopped process
        assert hanging.text == "" or "hang_here" in hanging.text


def test_without_pyspy_a_rank_writes_its_own_stack(hanging: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks.sys, "executable", "/nonexistent/python")
    monkeypatch.setenv("PATH", "")
    take_until_it_hangs(hanging)
    assert hanging.frames[0].startswith("hang_here (<string>:")


def test_a_process_that_is_gone_has_no_stack() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stack = Stack(name="rank0", pid=ended.pid, handler=3)
    take_stacks([stack])
    assert (stack.frames, stack.text) == ((), "")
    assert stacks.describe_stacks({0: stack}) == ["rank 0: its stack could not be read"]


def test_a_rank_in_a_collective_waits() -> None:
    stack = Stack(name="rank1", pid=7)
    stack.parse(NATIVE)
    assert stack.waits
    assert stacks.describe_stacks({1: stack}) == [
        "rank 1 waits in all_reduce (torch/distributed/distributed_c10d.py:3252) < all_sum (harness/trainer/learner.py:31)"
    ]
    stack.parse(NATIVE.replace("c10d::Work::wait", "recv").replace("torch/distributed", "x"))
    assert not stack.waits


def test_a_rank_that_waits_in_the_store_for_the_others_waits() -> None:
    """No frame of torch is on its stack, because the store waits in native code."""
    with subprocess.Popen([sys.executable, "-c", IN_A_STORE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        stack = Stack(name="rank0", pid=process.pid, handler=int(process.stdout.readline()))
        try:
            take_until_it_hangs(stack, "of_all")
        finally:
            process.kill()
    assert stack.waits, stack.text


def test_gpus_are_asked_only_where_there_is_a_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert stacks.gpu_memory() == ""
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "$1"\n')
    tool.chmod(0o755)
    assert "--query-gpu=index,uuid,memory.used" in stacks.gpu_memory()
