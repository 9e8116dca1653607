"""Processes of this host: find what a process has started, end it, and remove what it left in /dev/shm; and how a rank
ends at once, since its threads, and other ranks, may be in collectives that will never end.

A pid alone does not name a process for long, because the kernel reuses it. psutil.Process compares start times too.
"""

import ctypes
import math
import os
import re
import signal
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from traceback import clear_frames
from typing import NoReturn, TypeVar

import psutil

from harness.runtime import redact
from harness.runtime.errors import say, tell_torchrun

END_SECONDS = 10.0
"""How long a process may take to end after SIGKILL."""
POLL_SECONDS = 0.05

SHARED_MEMORY = "/dev/shm"
_STATE, _START, _EXIT_CODE = 0, 19, 49  # fields of /proc/PID/stat, counted from 0 after the name
# The inode in a line of /proc/PID/maps: address, permissions, offset, device, inode, path.
_MAPPED = re.compile(rf"^(?:\S+ ){{4}}(\d+) +{SHARED_MEMORY}/", re.MULTILINE)
_MAPPED_FOR_WRITING = re.compile(rf"^\S+ .w.s (?:\S+ ){{2}}(\d+) +{SHARED_MEMORY}/", re.MULTILINE)
_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
_AT_FDCWD, _STATX_BTIME, _STATX_BYTES, _STATX_BTIME_OFFSET = -100, 0x800, 256, 0x50  # of statx(2)
_PRCTL = {"PR_SET_PDEATHSIG": 1, "PR_SET_TIMERSLACK": 29, "PR_SET_CHILD_SUBREAPER": 36}
"""Linux's numbers, from <sys/prctl.h>."""

FAILED = 1

T = TypeVar("T")


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process still runs: not a zombie, and not another process that got the same pid."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the name, state first; none once the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def wait_status(pid: int) -> int | None:
    """Return the status that waitpid() gives for a zombie, without waiting for it; None if it is alive, or has been
    reaped.

    waitpid() itself gives nothing while other threads of the process are still ending.
    """
    fields = stat_fields(pid)
    return int(fields[_EXIT_CODE]) if fields and fields[_STATE] == "Z" else None


def descendants() -> dict[int, psutil.Process]:
    """Return the children of this process, and theirs, by pid."""
    return {child.pid: child for child in psutil.Process().children(recursive=True)}


def is_resource_tracker(process: psutil.Process) -> bool:
    """Return whether it is multiprocessing's resource tracker, which cleans up /dev/shm after its parent has ended."""
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def descendants_since(before: Collection[int]) -> dict[int, psutil.Process]:
    """Return the descendants of this process whose pids are not in `before`.

    Without multiprocessing's resource tracker: it ends by itself, after this process.
    """
    return {pid: child for pid, child in descendants().items() if pid not in before and not is_resource_tracker(child)}


def end_processes(processes: Mapping[int, psutil.Process], stop: Callable[[], None] | None = None) -> None:
    """Call stop(), then kill what is left of these processes, and return when all are gone.

    The files that they made in /dev/shm (25 MB for each engine) go too, except those that this process uses itself.
    """
    files = _made_by(processes)  # stop() may end processes without removing them
    try:
        if stop:
            stop()
    finally:
        _kill(processes, files)


def _kill(processes: Mapping[int, psutil.Process], files: set[Path]) -> None:
    """Kill what is left of these processes, and remove these files and those that they made since."""
    alive = [process for process in processes.values() if is_alive(process)]
    signal_all(alive, signal.SIGSTOP)  # from now on none makes a new file, or reacts to the end of another one
    files |= _made_by(processes)
    files -= shared_memory_files([os.getpid()])
    for file in files:  # before their ends: if we are killed here, others still see by these processes what to remove
        file.unlink(missing_ok=True)
    signal_all(alive, signal.SIGKILL)
    _wait_for_end(alive, END_SECONDS)


def signal_all(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.Error):  # it has just ended, or has become another user's (sudo)
            process.send_signal(number)


def _wait_for_end(processes: list[psutil.Process], seconds: float) -> None:
    """Wait until all have ended, for so many seconds at most. Reap our children.

    psutil.wait_procs alone would wait for zombies too, and in a container whose process 1 reaps nothing they stay.
    """
    deadline = time.monotonic() + seconds
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    psutil.wait_procs(processes, timeout=0)


def shared_memory_files(pids: Iterable[int]) -> set[Path]:
    used = used_by(pids)
    return {Path(SHARED_MEMORY, name) for name, inode in shared_files() if inode in used}


def shared_files() -> set[tuple[str, int]]:
    with os.scandir(SHARED_MEMORY) as files:
        return {(file.name, file.inode()) for file in files}


def _made_by(pids: Iterable[int]) -> set[Path]:
    """Return the files in /dev/shm that these processes use and that are younger than one of those that use them.

    Any other is somebody else's, such as a model that a user keeps there. Both times are known up to a tick of the
    kernel; a file that was made in the same tick is the process's own if it writes to it. If the clock has been set
    since this process began, it is not known which is younger: then none counts, because a file that stays is the
    smaller harm.
    """
    if abs(_booted() - _BOOTED) > 2 * _TICK_SECONDS:
        return set()
    there, found = {Path(SHARED_MEMORY, name): inode for name, inode in shared_files()}, set()
    for pid in pids:
        used, written = used_by([pid]), used_by([pid], for_writing=True)
        for file, inode in there.items():
            with suppress(OSError, ValueError):  # the file has just been removed, or the process has just ended
                age = _born_at(file) - start_time(pid) if inode in used else -math.inf
                if age > _TICK_SECONDS or (age > -_TICK_SECONDS and inode in written):
                    found.add(file)
    return found


def _born_at(file: Path) -> float:
    """Return when the file was made, in UNIX seconds. Raise OSError."""
    buffer = (ctypes.c_uint8 * _STATX_BYTES)()
    if ctypes.CDLL(None, use_errno=True).statx(_AT_FDCWD, os.fsencode(file), 0, _STATX_BTIME, buffer):
        raise OSError(ctypes.get_errno(), f"statx {file}")
    if int.from_bytes(buffer[:4], sys.byteorder) & _STATX_BTIME:
        seconds, nanoseconds = struct.unpack_from("=qI", buffer, _STATX_BTIME_OFFSET)
        return float(seconds + nanoseconds / 1e9)
    return file.stat().st_ctime  # an older kernel: when it last changed


def start_time(pid: int) -> float:
    """Return when the process was started, in UNIX seconds, up to a tick too early.

    Raise ValueError if it has ended.
    """
    if not (fields := stat_fields(pid)):
        raise ValueError(f"process {pid} has ended")
    return _booted() + int(fields[_START]) * _TICK_SECONDS


def _booted() -> float:
    """Return when this machine was started, in UNIX seconds, by the clock as it is set now."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


_BOOTED = _booted()


def used_by(pids: Iterable[int], for_writing: bool = False) -> set[int]:
    """Return the inodes of the files in /dev/shm that these processes map or have open, as far as we may read that.

    Not names: sem_open() makes a semaphore under another name than it then gives it. Not psutil's memory_maps(), which
    adds up every page.
    """
    used, mapped = set(), _MAPPED_FOR_WRITING if for_writing else _MAPPED
    for pid in pids:
        with suppress(OSError):  # it has just ended, or is another user's
            used |= {int(inode) for inode in mapped.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace"))}
            for link in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):  # closed in the meantime
                    counts = not for_writing or os.lstat(link.path).st_mode & stat.S_IWUSR
                    if counts and os.readlink(link.path).startswith(f"{SHARED_MEMORY}/"):
                        used.add(os.stat(link.path).st_ino)
    return used


def wake_on_time() -> None:
    """Have the kernel end this thread's timed waits when they are due.

    By default it may add 0.05 ms to each, the timer slack.
    """
    prctl("PR_SET_TIMERSLACK", 1)  # ns


def prctl(option: str, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PRCTL[option], value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def hard_exit(code: int) -> NoReturn:
    """Exit at once, and skip Python's own shutdown.

    If a thread of torch or gloo asks for the interpreter's lock while Python 3.11 shuts down, the process aborts
    ("terminate called without an active exception"). That made ranks fail that had passed, twice in some hundred test
    runs.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a full disk, or a pipe that nobody reads
            stream.flush()
    os._exit(code)


def end_failed(said: str, error: str, traceback: str, announce: Callable[[str, str], None]) -> NoReturn:
    """Print what happened, announce the error, and end what this process has started and itself.

    Call it from any thread.

    said: lines for the screen. announce: called with error and traceback. If a watchdog observes the run, it ends this
    process in there, and later prints the run's first failure.
    """
    said, error, traceback = map(redact.text, (said, error, traceback))
    say(said + "\n")
    tell_torchrun(error, traceback)
    announce(error, traceback)
    end_processes(descendants())
    hard_exit(FAILED)


def in_background(work: Callable[[], T], name: str) -> "Future[T]":
    """Run work() on a daemon thread: a collective that never ends then does not keep the process from exiting."""
    future: Future[T] = Future()

    def target() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            clear_frames(error.__traceback__)  # otherwise its frames keep the work's tensors alive
            future.set_exception(error)

    threading.Thread(target=target, name=name, daemon=True).start()
    return future
