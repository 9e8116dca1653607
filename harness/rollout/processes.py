"""The engine's child processes: their output kept in one file, their death noticed at once."""

import builtins
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

POLL_SECONDS = 0.5
START_POLL_SECONDS = 0.2
END_POLL_SECONDS = 0.05
STOP_SECONDS = 10.0

# The inode in a line of /proc/PID/maps: address, permissions, offset, device, inode, path.
_SHARED_MEMORY = re.compile(r"^(?:\S+ ){4}(\d+) +/dev/shm/", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last)"
# Python prints it before the traceback of an error in a destructor, which ends nothing.
_IGNORED = "Exception ignored in"
# The first line after a traceback's frames, which are indented: a dotted class name, bare or with a message. Another
# process's line may come between; unlike a class it has no capital, or no colon after its first word.
_ERROR_LINE = re.compile(r"^(?:\[[^\]]*\] )?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:: .*|:)?)$")
# A process that dies below Python leaves no traceback, but a line like these before pages of stacks.
_CRASH_LINE = re.compile(r"^(?:Fatal Python error: .*|terminate called after throwing an instance of .*)$")


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """While open, file descriptors 1 and 2 are the file, for this process and for every child it starts.

    The file starts empty: what an earlier run left there is not this one's. Children keep writing there after it
    closes. Python's own streams are flushed at both ends, so no line moves.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    saved = os.dup(1), os.dup(2)
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        for descriptor in (*saved, target):
            os.close(descriptor)


def first_error(log: str) -> str:
    """Return the first exception or crash of a log in one line, '' where it tells of none.

    In a log that several processes share, the line that ends the first traceback is the cause; what follows are
    consequences. Of chained exceptions Python prints the cause first. Errors that Python ignored do not count.
    """
    return next((error for _, error in errors(log)), "")


def errors(log: str) -> Iterator[tuple[list[str], str]]:
    """Yield each traceback of a log, with the line that ends it; a crash below Python has no traceback.

    Lines that another process wrote between are left out: those of a traceback are indented.
    """
    lines = [line.rstrip() for line in log.splitlines()]
    found: list[str] = []
    for previous, line in zip(["", *lines], lines, strict=False):
        if _CRASH_LINE.match(line):
            yield [], line
        elif _TRACEBACK in line:
            if not found and _IGNORED not in previous:
                found = [line]
        elif found and line.startswith(" "):
            found.append(line)
        elif found and (match := _ERROR_LINE.match(line)) and _is_error(match[1]):
            yield [*found, line], match[1]
            found = []


def _is_error(line: str) -> bool:
    """Whether it begins with the class of an exception, as a traceback ends: its module stands before it, save where it is
    Python's own or of the script. Otherwise it is what another process printed between, such as "Loading: 50%"."""
    name = line.partition(":")[0]
    own = getattr(builtins, name, None)
    is_own = isinstance(own, type) and issubclass(own, BaseException) and not issubclass(own, Warning)
    return is_own or ("." in name and not name.endswith("Warning")) or name.endswith(("Error", "Exception"))


def children() -> dict[int, psutil.Process]:
    """This process's descendants by pid."""
    return {child.pid: child for child in psutil.Process().children(recursive=True)}


def is_tracker(process: psutil.Process) -> bool:
    """Whether it is multiprocessing's resource tracker, which removes what is left in /dev/shm once its parent has ended."""
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def killed_by(child: BaseProcess | None) -> str:
    """The signal, such as SIGKILL, that ended a child; '' where it lives, or ended by itself.

    The child is multiprocessing's own object: SGLang's threads may have waited for the process before us, once for all.
    """
    code = child.exitcode if child else None
    return signal.Signals(-code).name if code is not None and code < 0 else ""


@contextmanager
def started_processes() -> Iterator[set[BaseProcess]]:
    """While open, note the processes that multiprocessing starts here and that live for START_POLL_SECONDS: it no longer lists
    one that SGLang waited for."""
    before = set(multiprocessing.active_children())
    started: set[BaseProcess] = set()
    closed = threading.Event()

    def look() -> None:
        while not closed.wait(START_POLL_SECONDS):
            started.update(set(multiprocessing.active_children()) - before)

    looking = threading.Thread(target=look, name="engine-start", daemon=True)
    looking.start()
    try:
        yield started
    finally:
        closed.set()
        looking.join()


@dataclass(slots=True)
class ChildWatch:
    """A thread that calls on_death(name, pid, signal) once when one of the watched processes is gone; the signal as from
    killed_by, where multiprocessing started that process.

    SGLang's own answer to a dead scheduler is SIGQUIT to its parent, whose handler SIGKILLs the whole process tree:
    the rank would vanish without a word, and every other rank would name the connection, not the cause.
    """

    watched: dict[int, psutil.Process]
    on_death: Callable[[str, int, str], None]
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin to watch."""
        started = {child.pid: child for child in multiprocessing.active_children()}
        threading.Thread(target=self._watch, args=[started], name="engine-watch", daemon=True).start()

    def stop(self) -> None:
        """End it; a death after this is nobody's concern."""
        self._stop.set()

    def _watch(self, started: Mapping[int | None, BaseProcess]) -> None:
        names = {pid: _name(process) for pid, process in self.watched.items()}
        while not self._stop.wait(POLL_SECONDS):
            gone = {pid: killed_by(started.get(pid)) for pid, process in self.watched.items() if not _alive(process)}
            if gone:
                # Of several that one which did not end by itself: it took the others along.
                pid = max(gone, key=lambda each: bool(gone[each]))
                if not self._stop.is_set():
                    self.on_death(names[pid], pid, gone[pid])
                return


def end(
    processes: dict[int, psutil.Process], stop: Callable[[], None] | None = None, patience_seconds: float = STOP_SECONDS
) -> None:
    """stop(), SIGTERM, then SIGKILL what is left after patience_seconds; returns when all are gone.

    The names they had in /dev/shm go too, 25 MB an engine, save what this process uses itself: it removes those, or its
    resource tracker does.
    """
    shared = shared_memory_files(processes) - shared_memory_files([os.getpid()])
    if stop:
        stop()
    alive = [process for process in processes.values() if _alive(process)]
    for process in alive:
        _signal(process.terminate)
    stubborn = _wait(alive, patience_seconds)
    for process in stubborn:
        _signal(process.kill)
    _wait(stubborn, STOP_SECONDS)
    for file in shared:
        file.unlink(missing_ok=True)


def shared_memory_files(processes: Iterable[int]) -> set[Path]:
    """The files in /dev/shm that these processes (pids) map.

    Matched by inode: sem_open makes a semaphore under another name than it then gives it. Not psutil's memory_maps: it
    adds up every page.
    """
    inodes: set[int] = set()
    for pid in processes:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended, and holds nothing any more; or is another user's, and holds nothing of ours
        inodes |= {int(inode) for inode in _SHARED_MEMORY.findall(maps)}
    with os.scandir("/dev/shm") as files:
        return {Path(file.path) for file in files if file.inode() in inodes}


def _wait(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those still alive after this time, or none as soon as all have ended; those that are our children are reaped.

    psutil.wait_procs alone would wait for zombies too, and an orphan stays one where process 1 of a container reaps none.
    """
    deadline = time.monotonic() + seconds
    while (alive := [process for process in processes if _alive(process)]) and time.monotonic() < deadline:
        time.sleep(END_POLL_SECONDS)
    psutil.wait_procs(processes, timeout=0)
    return alive


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "engine process"


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(send: Callable[[], None]) -> None:
    with suppress(psutil.NoSuchProcess):  # it ended between the look and the signal, which is what was wanted
        send()
