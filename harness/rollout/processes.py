"""The engine's child processes: their output kept in one file, their death noticed at once."""

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

POLL_SECONDS = 0.5
STOP_SECONDS = 10.0

_TRACEBACK = "Traceback (most recent call last)"
_ERROR_LINE = re.compile(r"^(?:\[[^\]]*\] )?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Refused|Died)\b.*)$")


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """While open, file descriptors 1 and 2 are the file, for this process and for every child it starts.

    Children keep writing there after it closes. Python's own streams are flushed at both ends, so no line moves.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
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
    """The first exception of a log in one line, else its last line that is not empty, else ''.

    In a log that several processes share, the first traceback's last line is the cause; what follows it are
    consequences.
    """
    lines = [line.rstrip() for line in log.splitlines()]
    start = next((index for index, line in enumerate(lines) if _TRACEBACK in line), None)
    if start is not None:
        for line in lines[start + 1 :]:
            match = _ERROR_LINE.match(line)
            if match:
                return match[1]
    return next((line for line in reversed(lines) if line.strip()), "")


def children() -> dict[int, psutil.Process]:
    """This process's descendants by pid."""
    return {child.pid: child for child in psutil.Process().children(recursive=True)}


@dataclass(slots=True)
class ChildWatch:
    """A thread that calls on_death(name, pid) once when one of the watched processes is gone.

    SGLang's own answer to a dead scheduler is SIGQUIT to its parent, whose handler SIGKILLs the whole process tree:
    the rank would vanish without a word, and every other rank would name the connection, not the cause.
    """

    watched: dict[int, psutil.Process]
    on_death: Callable[[str, int], None]
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._watch, name="engine-watch", daemon=True).start()

    def stop(self) -> None:
        """End it; a death after this is nobody's concern."""
        self._stop.set()

    def _watch(self) -> None:
        names = {pid: process.name() for pid, process in self.watched.items() if process.is_running()}
        while not self._stop.wait(POLL_SECONDS):
            for pid, process in self.watched.items():
                if not _alive(process):
                    if not self._stop.is_set():
                        self.on_death(names.get(pid, "engine process"), pid)
                    return


def end(processes: dict[int, psutil.Process]) -> None:
    """SIGTERM, then SIGKILL what is left after STOP_SECONDS; returns when all are gone."""
    alive = [process for process in processes.values() if _alive(process)]
    for process in alive:
        _signal(process.terminate)
    _, stubborn = psutil.wait_procs(alive, timeout=STOP_SECONDS)
    for process in stubborn:
        _signal(process.kill)
    psutil.wait_procs(stubborn, timeout=STOP_SECONDS)


def ignore_signal(signum: int, frame: object) -> None:
    """Handler for the SIGQUIT with which a failing scheduler asks its parent to die: ChildWatch reports it instead.

    At module level, because SGLang pickles the handler into its schedulers.
    """


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(send: Callable[[], None]) -> None:
    try:
        send()
    except psutil.NoSuchProcess:
        pass  # it ended between the look and the signal, which is what was wanted
