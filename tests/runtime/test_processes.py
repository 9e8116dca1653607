"""Real processes, real files in /dev/shm."""

import ctypes
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.runtime import processes
from harness.runtime.processes import descendants, end_processes, is_alive, shared_memory_files

# Maps a file in /dev/shm, as a scheduler does, and has no resource tracker that would clean up after it.
HOLDER = """
import mmap, os, sys, time
descriptor = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
os.ftruncate(descriptor, 4096)
held = mmap.mmap(descriptor, 4096)
print("ready", flush=True)
time.sleep(60)
"""
LATE_HOLDER = (
    "import sys; sys.stdin.readline(); file = open(sys.argv[1], 'w'); print('ready', flush=True); sys.stdin.read()"
)
READER = "import sys; file = open(sys.argv[1], 'rb'); print('ready', flush=True); sys.stdin.read()"
ENDER = """
import psutil
from harness.runtime.processes import end_processes
end_processes({{{0}: psutil.Process({0})}})
"""
SLEEPER = "import time; time.sleep(60)"
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}])
print(child.pid, flush=True)
time.sleep(60)
"""


def python(code: str, *words: object, **options: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", code, *map(str, words)], text=True, **options)


def shared(name: str) -> Path:
    """A path in /dev/shm that no other test uses, not even one of another checkout."""
    return Path(f"/dev/shm/harness_test_{uuid.uuid4().hex}_{name}")


def first_line(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def holder(file: Path) -> "subprocess.Popen[str]":
    process = python(HOLDER, file, stdout=subprocess.PIPE)
    assert first_line(process) == "ready\n"
    return process


def test_a_process_that_is_killed_while_it_ends_another_leaves_no_shared_memory() -> None:
    """Nothing shows any more whose file it was, once the process that made it is dead."""
    file = shared("ender")
    held = holder(file)
    end = os.pidfd_open(held.pid)
    ender = python(ENDER.format(held.pid))
    select.select([end], [], [])
    ender.kill()
    os.close(end)
    ender.wait()
    held.wait()
    was_left = file.exists()
    file.unlink(missing_ok=True)
    assert not was_left


@pytest.mark.parametrize("writes", [True, False])
def test_a_file_that_was_there_before_the_processes_stays(writes: bool) -> None:
    """As a user's model does."""
    file = shared("model.gguf")
    file.write_bytes(b"weights")
    while time.time() < file.stat().st_ctime + 0.1:
        pass  # the kernel tells the start of a process up to 10 ms
    try:
        if writes:
            process = holder(file)
        else:
            process = python(READER, file, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert first_line(process) == "ready\n"
        assert shared_memory_files([process.pid]) == {file}
        end_processes({process.pid: psutil.Process(process.pid)})
        assert file.exists()
        process.communicate()
    finally:
        file.unlink(missing_ok=True)


@pytest.mark.parametrize("fails", [False, True])
def test_end_looks_for_files_before_it_calls_stop_and_ends_all_although_that_fails(fails: bool) -> None:
    """SGLang's own shutdown kills the processes: afterwards nobody can say what they held."""
    file = shared("stop")
    child, other = holder(file), python(SLEEPER)

    def stop() -> None:
        child.kill()
        if fails:
            raise RuntimeError("no answer")

    with pytest.raises(RuntimeError, match="no answer") if fails else nullcontext():
        end_processes({each.pid: psutil.Process(each.pid) for each in (child, other)}, stop)
    child.wait(timeout=5)
    other.wait(timeout=5)
    assert not file.exists()


def test_end_finds_a_file_that_is_made_while_it_ends_the_processes() -> None:
    file = shared("late")
    late = python(LATE_HOLDER, file, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def stop() -> None:
        late.stdin.write("go\n")  # type: ignore[union-attr]
        late.stdin.flush()  # type: ignore[union-attr]
        assert first_line(late) == "ready\n"

    end_processes({late.pid: psutil.Process(late.pid)}, stop)
    assert not file.exists()
    late.communicate()


def test_end_removes_a_file_that_a_process_makes_as_soon_as_it_starts() -> None:
    """Sooner than Python, which takes 10 ms to start."""
    file = shared("soon")
    for _ in range(20):
        words = ["/bin/sh", "-c", f"exec 3<>{file}; echo ready; read line"]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert first_line(process) == "ready\n"
        end_processes({process.pid: psutil.Process(process.pid)})
        assert not file.exists()
        process.communicate()


def test_a_semaphore_is_found_under_its_name_and_nothing_of_a_process_that_has_ended() -> None:
    """It is mapped as /dev/shm/sem.XXXXXX (deleted)."""
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    name = semaphore._semlock.name  # type: ignore[attr-defined]
    assert Path(f"/dev/shm/sem.{name.removeprefix('/')}") in shared_memory_files([os.getpid()])
    ended = python("pass")
    ended.wait()
    assert shared_memory_files([ended.pid]) == set()


def test_children_are_all_descendants_and_end_ends_them() -> None:
    parent = python(PARENT, stdout=subprocess.PIPE)
    family = {parent.pid, int(first_line(parent))}
    found = {pid: process for pid, process in descendants().items() if pid in family}
    assert found.keys() == family
    end_processes(found)
    assert not any(is_alive(process) for process in found.values())
    parent.communicate()


def test_end_kills_children_that_ignore_sigterm_or_are_stopped() -> None:
    deaf, stopped = python(DEAF, stdout=subprocess.PIPE), python(SLEEPER)
    assert first_line(deaf) == "deaf\n"
    stopped.send_signal(signal.SIGSTOP)
    end_processes({child.pid: psutil.Process(child.pid) for child in (deaf, stopped)})
    assert not psutil.pid_exists(deaf.pid) and not psutil.pid_exists(stopped.pid)
    deaf.communicate()
    stopped.wait()


def test_end_does_not_wait_for_a_zombie_that_its_parent_never_reaps() -> None:
    parent = python(PARENT, stdout=subprocess.PIPE)
    grandchild = psutil.Process(int(first_line(parent)))
    started = time.monotonic()
    end_processes({grandchild.pid: grandchild})
    assert time.monotonic() - started < processes.END_SECONDS / 2
    assert grandchild.status() == psutil.STATUS_ZOMBIE
    end_processes({parent.pid: psutil.Process(parent.pid)})
    parent.communicate()


def test_a_thread_that_wakes_on_time_has_no_timer_slack_and_the_one_that_started_it_keeps_its_own() -> None:
    set_slack, get_slack = 29, 30  # of prctl(2), in ns
    libc = ctypes.CDLL(None)

    def on_time() -> int:
        processes.wake_on_time()
        return int(libc.prctl(get_slack, 0, 0, 0, 0))

    def starter() -> tuple[int, int]:
        libc.prctl(set_slack, 50_000, 0, 0, 0)
        with ThreadPoolExecutor() as pool:
            found = pool.submit(on_time).result()
        return found, int(libc.prctl(get_slack, 0, 0, 0, 0))

    with ThreadPoolExecutor() as pool:
        assert pool.submit(starter).result() == (1, 50_000)


def test_after_the_clock_was_set_nobodys_file_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set back, a file that a user made before the process began would look younger than it."""
    file = shared("clock")
    process = psutil.Process(holder(file).pid)
    monkeypatch.setattr(processes, "_booted", lambda: processes._BOOTED - 60)
    try:
        end_processes({process.pid: process})
        assert file.exists() and not process.is_running()
    finally:
        file.unlink()
