"""Real processes, real files in /dev/shm."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.rollout.processes import end, shared_memory_files
from harness.rollout.signals import sigquit_raises

# Maps a file in /dev/shm, as a scheduler does, and has no resource tracker that would clean up after it.
HOLDER = """
import mmap, os, signal, sys, time
descriptor = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
os.ftruncate(descriptor, 4096)
held = mmap.mmap(descriptor, 4096)
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""


def holder(file: Path, manner: str = "") -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(file), manner], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("manner", ["", "stubborn"])
def test_end_leaves_no_process_and_no_shared_memory(manner: str) -> None:
    file = Path("/dev/shm/harness_test_end")
    process = psutil.Process(holder(file, manner).pid)
    assert shared_memory_files([process.pid]) == {file}
    end({process.pid: process}, patience_seconds=0.5)
    assert not process.is_running()
    assert not file.exists()


def test_end_looks_before_it_stops() -> None:
    """SGLang's own shutdown kills the processes: afterwards nobody can say what they held."""
    file = Path("/dev/shm/harness_test_stop")
    child = holder(file)
    end({child.pid: psutil.Process(child.pid)}, stop=child.kill)
    child.wait(timeout=5)
    assert not file.exists()


def test_a_semaphore_is_found_under_its_name() -> None:
    """It is mapped as /dev/shm/sem.XXXXXX (deleted)."""
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    name = semaphore._semlock.name  # type: ignore[attr-defined]
    assert Path(f"/dev/shm/sem.{name.removeprefix('/')}") in shared_memory_files([os.getpid()])


def test_a_process_that_has_ended_holds_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    assert shared_memory_files([process.pid]) == set()


def test_sigquit_raises_instead_of_what_was_registered() -> None:
    before = signal.getsignal(signal.SIGQUIT)
    killed: list[int] = []
    try:
        with sigquit_raises():
            signal.signal(signal.SIGQUIT, lambda number, frame: killed.append(number))
            with pytest.raises(ChildProcessError):
                os.kill(os.getpid(), signal.SIGQUIT)
                time.sleep(5)
        assert not killed
        assert signal.signal.__name__ == "signal"
    finally:
        signal.signal(signal.SIGQUIT, before)
