"""Processes of this host, known before they are orphans: who started whom, how one ended, and the end of all of them."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals

import psutil

from harness.runtime.errors import SPEAKS_LAST
from harness.runtime.processes import is_alive, is_stopped, stat_fields

MARK = "HARNESS_WATCHDOG"
"""Variable that whatever a rank starts inherits: the name of its watchdog."""

# Fields of /proc/PID/stat, counted from 0 after the name, which ends with the last parenthesis.
_STATE, _PARENT, _EXIT_CODE = 0, 1, 49


@dataclass(slots=True)
class Descendants:
    """Whatever the ranks started, seen while its parents lived: an orphan has another parent, and no name of ours."""

    known: dict[int, psutil.Process] = field(default_factory=dict)
    rank_of: dict[int, int] = field(default_factory=dict)
    """The pid of the rank that each of them descends from."""

    def look(self, ranks: Iterable[int]) -> None:
        """Note the descendants of these processes, and forget those that have ended."""
        self.known = {pid: process for pid, process in self.known.items() if is_alive(process)}
        started: dict[int, list[int]] = {}
        for pid in psutil.pids():
            fields = stat_fields(pid)
            if fields:
                started.setdefault(int(fields[_PARENT]), []).append(pid)
        waiting = [*ranks, *self.known]
        seen = set(waiting)
        while waiting:
            parent = waiting.pop()
            for pid in started.get(parent, []):
                if pid not in seen:
                    seen.add(pid)
                    waiting.append(pid)
                    with suppress(psutil.NoSuchProcess):
                        self.known[pid] = psutil.Process(pid)
                        self.rank_of[pid] = self.rank_of.get(parent, parent)

    def stopped(self) -> list[psutil.Process]:
        """Return those that were sent SIGSTOP, or that a debugger holds."""
        return [process for pid, process in self.known.items() if is_stopped(pid)]

    def look_for_orphans(self, run: str) -> None:
        """Note what a rank of this run started just before it died, too late to be seen beside it; forget what outlives it."""
        mark, outlives = f"{MARK}={run}".encode(), f"{SPEAKS_LAST}=1".encode()
        for pid in psutil.pids():
            with suppress(OSError, psutil.NoSuchProcess):  # it has just ended, or is another user's
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if outlives in variables:
                    self.known.pop(pid, None)
                elif mark in variables:
                    self.known[pid] = psutil.Process(pid)


def launcher() -> psutil.Process:
    """What started the ranks of this host, torchrun as a rule: the nearest ancestor that is no rank, nor a rank's wrapper."""
    ancestors = psutil.Process().parents()
    for process in ancestors:
        try:
            if "LOCAL_RANK" not in process.environ():
                return process
        except psutil.Error:
            return process  # of another user, so none of ours
    return ancestors[-1] if ancestors else psutil.Process()


def how_it_ended(pid: int) -> str | None:
    """ "was killed by SIGKILL" or "ended with exit code 3", for as long as its parent has not asked; else None."""
    fields = stat_fields(pid)
    if not fields or fields[_STATE] != "Z":
        return None
    return said_status(int(fields[_EXIT_CODE]))


def said_status(status: int) -> str:
    """Return a wait status in words."""
    number = status & 0x7F
    if number in list(Signals):
        return f"was killed by {Signals(number).name}"
    return f"was killed by signal {number}" if number else f"ended with exit code {status >> 8}, without a word"
