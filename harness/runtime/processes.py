"""Processes of this host: whether one is alive, what this one has started, and how to end them.

A pid alone names no process for long: use psutil.Process, which compares start times too.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

STOP_SECONDS = 10.0
"""How long a process may take to end after SIGTERM, by default, and after SIGKILL."""
POLL_SECONDS = 0.05

# The inode in a line of /proc/PID/maps: address, permissions, offset, device, inode, path.
_SHARED_MEMORY = re.compile(r"^(?:\S+ ){4}(\d+) +/dev/shm/", re.MULTILINE)


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process runs: it is neither a zombie nor another process that got the same pid."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descendants() -> dict[int, psutil.Process]:
    """Return the children of this process, and theirs, by pid."""
    return {child.pid: child for child in psutil.Process().children(recursive=True)}


def is_resource_tracker(process: psutil.Process) -> bool:
    """Return whether it is multiprocessing's, which removes what is left in /dev/shm once its parent has ended."""
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def end_processes(
    processes: Mapping[int, psutil.Process],
    stop: Callable[[], None] | None = None,
    patience_seconds: float = STOP_SECONDS,
) -> None:
    """Call stop(), send SIGTERM, then SIGKILL what is left after patience_seconds; return when all are gone.

    The names they had in /dev/shm go too, 25 MB an engine, except those that this process uses itself: it removes
    those, or its resource tracker does.
    """
    shared = shared_memory_files(processes) - shared_memory_files([os.getpid()])
    if stop:
        stop()
    alive = [process for process in processes.values() if is_alive(process)]
    for process in alive:
        with suppress(psutil.NoSuchProcess):  # it has just ended, which is what was wanted
            process.terminate()
    stubborn = _wait(alive, patience_seconds)
    for process in stubborn:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _wait(stubborn, STOP_SECONDS)
    for file in shared:
        file.unlink(missing_ok=True)


def _wait(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Return those still alive after this time, or none as soon as all have ended; reap those that are our children.

    psutil.wait_procs alone would wait for zombies too, and an orphan stays one where process 1 of a container reaps none.
    """
    deadline = time.monotonic() + seconds
    while (alive := [process for process in processes if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    psutil.wait_procs(processes, timeout=0)
    return alive


def shared_memory_files(pids: Iterable[int]) -> set[Path]:
    """Return the files in /dev/shm that these processes map.

    Matched by inode: sem_open makes a semaphore under another name than it then gives it. Not psutil's memory_maps: it
    adds up every page.
    """
    inodes: set[int] = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended and holds nothing any more, or is another user's and holds nothing of ours
        inodes |= {int(inode) for inode in _SHARED_MEMORY.findall(maps)}
    with os.scandir("/dev/shm") as files:
        return {Path(file.path) for file in files if file.inode() in inodes}


def name_and_pid(process: psutil.Process) -> str:
    """Return "name (pid 7)", for messages."""
    with suppress(psutil.Error):
        return f"{process.name()} (pid {process.pid})"
    return f"a process (pid {process.pid})"
