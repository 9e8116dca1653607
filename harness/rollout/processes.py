"""The engine's child processes: their output kept in one file, their death noticed at once."""

import builtins
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from harness.runtime.processes import is_alive

POLL_SECONDS = 0.5
START_POLL_SECONDS = 0.2

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
            gone = {pid: killed_by(started.get(pid)) for pid, process in self.watched.items() if not is_alive(process)}
            if gone:
                # Of several that one which did not end by itself: it took the others along.
                pid = max(gone, key=lambda each: bool(gone[each]))
                if not self._stop.is_set():
                    self.on_death(names[pid], pid, gone[pid])
                return


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "engine process"
