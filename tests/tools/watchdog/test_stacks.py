"""Stacks of real processes, through py-spy and through their own faulthandler; and which processes are idle."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.tools.watchdog import stacks
from harness.tools.watchdog.stacks import Stack, StackRequest, describe_idle, idle_processes, take_stacks

SCRIPT = """
import sys, threading, time
from harness.tools.watchdog.stacks import offer_own_stack
def hang_here():
    time.sleep(600)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print(offer_own_stack(), flush=True)
hang_here()
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
def hanging() -> Iterator[StackRequest]:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield StackRequest(name="rank0", pid=process.pid, handler=int(process.stdout.readline()))
        process.kill()


def test_a_process_that_hangs_is_seen(hanging: StackRequest) -> None:
    time.sleep(0.2)
    (stack,) = take_stacks([hanging])
    assert any(frame.startswith("hang_here") for frame in stack.frames), stack
    assert not stack.waits


def test_a_stopped_process_is_seen_where_pyspy_may_look(hanging: StackRequest) -> None:
    os.kill(hanging.pid, signal.SIGSTOP)
    (stack,) = take_stacks([hanging])
    assert stack.text == "" or "hang_here" in stack.text  # without py-spy's permission nobody sees it


def test_without_pyspy_a_rank_tells_itself(hanging: StackRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks.sys, "executable", "/nonexistent/python")
    monkeypatch.setenv("PATH", "")
    time.sleep(0.2)
    (stack,) = take_stacks([hanging])
    assert stack.frames[0].startswith("hang_here (<string>:")


def test_who_is_gone_has_no_stack() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (stack,) = take_stacks([StackRequest(name="rank0", pid=ended.pid, handler=3)])
    assert (stack.frames, stack.text) == ((), "")
    assert stacks.describe_stacks({0: stack}) == ["rank 0: its stack could not be read"]


def test_a_rank_in_a_collective_waits() -> None:
    stack = stacks._parse("rank1", NATIVE)
    assert stack.waits
    assert stacks.describe_stacks({1: stack}) == [
        "rank 1 waits in all_reduce (torch/distributed/distributed_c10d.py:3252) < all_sum (harness/trainer/learner.py:31)"
    ]
    assert not stacks._parse(
        "rank1", NATIVE.replace("c10d::Work::wait", "recv").replace("torch/distributed", "x")
    ).waits


def test_gpus_are_asked_only_where_there_is_a_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert stacks.gpu_memory() == ""
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "$1"\n')
    tool.chmod(0o755)
    assert "--query-gpu=index,uuid,memory.used" in stacks.gpu_memory()


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
    assert idle_processes(by_pid) == [hangs]
    stack = Stack(name=f"python-{hangs}", text="", frames=("sleep (a.py:1)", "main (a.py:9)", "f"), waits=False)
    (line,) = describe_idle([hangs], by_pid, [stack])
    assert line.endswith(f"(pid {hangs}) in sleep (a.py:1) < main (a.py:9)")
    assert describe_idle([], by_pid, [stack]) == []
