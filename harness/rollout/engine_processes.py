"""The processes of an engine, seen by the one that builds it: their log, their deaths, and the signals they send.

SGLang's own answer to a dead scheduler is SIGQUIT to its parent, whose handler SIGKILLs the whole process tree: the rank
would vanish silently, and every other rank would name the connection, not the cause.
"""

import builtins
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from harness.rollout.engine_errors import EngineFailed
from harness.runtime.processes import is_alive

POLL_SECONDS = 0.5
TAKEN = (signal.SIGTERM, signal.SIGQUIT)
"""SGLang sets handlers of its own, which ignore the first and SIGKILL this process's whole tree on the second."""
ENDING_SIGNALS = ("SIGKILL", "SIGTERM")
"""They end a process from outside: it logs no error, and one in the log, which all share, is a consequence."""

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
    """While open, file descriptors 1 and 2 are the file, emptied first, for this process and for every child it starts.

    Children keep writing there after it closes. Python's own streams are flushed at both ends, so no line moves.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    streams = {1: sys.stdout, 2: sys.stderr}
    with ExitStack() as after, path.open("ab") as file:
        for descriptor, stream in streams.items():
            stream.flush()
            saved = os.dup(descriptor)
            after.callback(os.close, saved)
            after.callback(os.dup2, saved, descriptor)
            after.callback(stream.flush)
            os.dup2(file.fileno(), descriptor)
        yield


def log_errors(log: str) -> Iterator[tuple[list[str], str]]:
    """Yield each traceback of a log, with the line that ends it; a crash below Python has no traceback.

    The first one is the cause: of chained exceptions Python prints it first. Errors that Python ignored do not count,
    and lines that another process wrote between are left out: those of a traceback are indented.
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
    """Return whether it begins with the class of an exception, unlike "Loading: 50%" of another process."""
    name = line.partition(":")[0]
    own = getattr(builtins, name, None)
    is_own = isinstance(own, type) and issubclass(own, BaseException) and not issubclass(own, Warning)
    return is_own or ("." in name and not name.endswith("Warning")) or name.endswith(("Error", "Exception"))


@dataclass(slots=True)
class EngineLog:
    """The log that the processes of one engine share, and what it says of a failure."""

    path: Path
    survived: int = 0
    """Bytes that were there when the engine last answered a call: no error in them is what it died of."""

    def answered(self) -> None:
        """Note that the engine has answered a call."""
        self.survived = self.path.stat().st_size

    def start_failure(self, error: Exception, started: Collection[BaseProcess]) -> str:
        """Return why the engine did not start: the exception, or the log's error where one of its processes failed."""
        failed = any(each.exitcode is not None and ending_signal(each) not in ENDING_SIGNALS for each in started)
        logged = self._error() if failed or isinstance(error, ChildProcessError) else ""
        return f"{logged or in_one_line(error)} (whole log: {self.path})"

    def death(self, name: str, pid: int, signal_name: str) -> str:
        """Return what is known of the end of a process of the engine; signal_name as watch_processes gives it."""
        how = f" of {signal_name}" if signal_name else ""
        if signal_name not in ENDING_SIGNALS:
            how += f": {self._error() or 'its log tells of no error'}"
        return f"engine process {name} (pid {pid}) died{how} (whole log: {self.path})"

    def _error(self) -> str:
        log = self.path.read_bytes()[self.survived :].decode(errors="replace")
        return next((line for _, line in log_errors(log)), "")


def in_one_line(error: BaseException) -> str:
    """Return an exception in one line, for the other ranks."""
    return str(error) if isinstance(error, EngineFailed) else f"{type(error).__name__}: {error}"


def ending_signal(child: BaseProcess | None) -> str:
    """Return the signal, such as SIGKILL, that ended a child; '' where it is alive, or exited.

    The child is multiprocessing's own object: SGLang's threads may have waited for the process before us, once for all.
    """
    code = child.exitcode if child else None
    return signal.Signals(-code).name if code is not None and code < 0 else ""


@contextmanager
def started_processes() -> Iterator[list[BaseProcess]]:
    """While open, note the processes that multiprocessing starts here: it forgets those that SGLang has waited for."""
    started: list[BaseProcess] = []
    real = BaseProcess.start

    def start(self: BaseProcess) -> None:
        real(self)
        started.append(self)

    with patch.object(BaseProcess, "start", start):
        yield started


def watch_processes(
    watched: Mapping[int, psutil.Process], on_death: Callable[[str, int, str], None]
) -> threading.Event:
    """Call on_death(name, pid, ending_signal) once, on a thread, when one of these is gone; set the event to stop."""
    stop = threading.Event()
    started = {child.pid: child for child in multiprocessing.active_children()}

    def watch() -> None:
        names = {pid: _name(process) for pid, process in watched.items()}
        while not stop.wait(POLL_SECONDS):
            if dead := [pid for pid, process in watched.items() if not is_alive(process)]:
                signals = {pid: ending_signal(started.get(pid)) for pid in dead}
                # Of several the one that was ended by a signal: it took the others along.
                pid = max(dead, key=lambda each: bool(signals[each]))
                if not stop.is_set():
                    on_death(names[pid], pid, signals[pid])
                return

    threading.Thread(target=watch, name="engine-watch", daemon=True).start()
    return stop


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "engine process"


def own_handlers() -> dict[signal.Signals, Any]:
    """Return this process's handlers of the signals that SGLang takes, before an engine is built."""
    return {number: signal.getsignal(number) for number in TAKEN}


def restore_handlers(own: Mapping[signal.Signals, Any], engine_serves: bool) -> None:
    """Set own handlers again; while an engine serves, SIGQUIT is ignored: watch_processes reports a scheduler's death.

    Raises ValueError in another thread than the main one.
    """
    for number, handler in own.items():
        signal.signal(number, ignore_signal if number == signal.SIGQUIT and engine_serves else handler)


@contextmanager
def sigquit_raises() -> Iterator[None]:
    """While open, a handler that is set for SIGQUIT is replaced by one that raises ChildProcessError in the main thread.

    For releases without custom_sigquit_handler (before 0.5.7), which would SIGKILL this process silently when a
    scheduler fails at start.
    """
    real = signal.signal

    def fail(signum: int, frame: object) -> None:
        raise ChildProcessError("a process of the engine asked its parent to end")

    with patch.object(signal, "signal", lambda number, own: real(number, fail if number == signal.SIGQUIT else own)):
        yield


@contextmanager
def sigterm_blocked() -> Iterator[None]:
    """While open, the processes that this thread starts are deaf to SIGTERM, which waits for this one.

    torchrun sends it to a rank's whole process group, but a rank that saves at SIGTERM needs its engine until then.
    """
    resource_tracker.ensure_running()  # its start would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signal(signum: int, frame: object) -> None:
    """Ignore the SIGQUIT with which a failing scheduler asks its parent to die: watch_processes reports the death.

    At module level, because SGLang pickles the handler into its schedulers.
    """
