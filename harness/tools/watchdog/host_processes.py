"""Processes of this host that are not our children: who started whom, how each ended, and which are stopped or hang."""

import fcntl
import os
import select
import struct
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals

import psutil

from harness.runtime.errors import SPEAKS_LAST
from harness.runtime.processes import is_alive, is_stopped, stat_fields

MARK = "HARNESS_WATCHDOG"
"""Variable that every process which a rank starts inherits: the name of its watchdog."""
STOPPED = "is stopped (SIGSTOP, or a debugger)"
NO_MESSAGE = ", without an error message"

_STATE, _PARENT, _EXIT_CODE = 0, 1, 49  # fields of /proc/PID/stat, counted from 0 after the name
# struct pidfd_info, its first version: mask, cgroup, eleven numbers of 4 bytes of which the last is the exit code.
_SIZE, _EXIT_CODE_AT = 64, 60
_PIDFD_GET_INFO = (3 << 30) | (_SIZE << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3


@dataclass(slots=True)
class Descendants:
    """All that the ranks started, noted while its parents are alive: an orphan has another parent."""

    known: dict[int, psutil.Process] = field(default_factory=dict)
    rank_of: dict[int, int] = field(default_factory=dict)  # pid of each -> pid of the rank that it descends from

    def look(self, ranks: Iterable[int]) -> None:
        """Note the descendants of these pids, and forget those that have ended."""
        self.known = {pid: process for pid, process in self.known.items() if is_alive(process)}
        children: dict[int, list[int]] = {}
        for pid in psutil.pids():
            if fields := stat_fields(pid):
                children.setdefault(int(fields[_PARENT]), []).append(pid)
        waiting = [*ranks, *self.known]
        seen = set(waiting)
        while waiting:
            parent = waiting.pop()
            for pid in children.get(parent, []):
                if pid not in seen:
                    seen.add(pid)
                    waiting.append(pid)
                    with suppress(psutil.NoSuchProcess):
                        self.known[pid] = psutil.Process(pid)
                        self.rank_of[pid] = self.rank_of.get(parent, parent)

    def look_for_orphans(self, name: str) -> None:
        """Note what a rank of this watchdog started just before it died; forget what outlives the run on purpose."""
        mark, outlives = f"{MARK}={name}".encode(), f"{SPEAKS_LAST}=1".encode()
        for pid in psutil.pids():
            with suppress(OSError, psutil.NoSuchProcess):  # it has just ended, or is another user's
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if outlives in variables:
                    self.known.pop(pid, None)
                elif mark in variables:
                    self.known[pid] = psutil.Process(pid)


@dataclass(slots=True)
class ExitWatch:
    """Notes how a process ends, at that moment: torchrun reaps ten times a second, and /proc forgets."""

    pid: int
    how: str | None = None  # as from how_it_ended; None while it is alive, or if that was not seen
    over: threading.Event = field(default_factory=threading.Event)  # set at its end, and if it cannot be watched

    def start(self) -> "ExitWatch":
        """Watch on a thread."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:  # it has ended, or this kernel has no pidfd
            self.over.set()
            return self
        threading.Thread(target=self._wait, args=[descriptor], name=f"exit of {self.pid}", daemon=True).start()
        return self

    def _wait(self, descriptor: int) -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
        self.how = how_it_ended(self.pid) or _status_from_kernel(descriptor)
        os.close(descriptor)
        self.over.set()


def _status_from_kernel(descriptor: int) -> str | None:
    """Return how a process ended that has been reaped, which Linux reports since 6.15; else None."""
    answer = bytearray(struct.pack("Q", _PIDFD_INFO_EXIT) + bytes(_SIZE - 8))
    with suppress(OSError):
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, answer)
        (mask,), (status,) = struct.unpack_from("Q", answer), struct.unpack_from("i", answer, _EXIT_CODE_AT)
        if mask & _PIDFD_INFO_EXIT:
            return describe_status(status)
    return None


def how_it_ended(pid: int) -> str | None:
    """Return "was killed by SIGKILL" or the like for a zombie; None if it is alive, or has been reaped."""
    fields = stat_fields(pid)
    return describe_status(int(fields[_EXIT_CODE])) if fields and fields[_STATE] == "Z" else None


def describe_status(status: int) -> str:
    """Return a wait status in words."""
    number = status & 0x7F
    if number in list(Signals):
        return f"was killed by {Signals(number).name}"
    return f"was killed by signal {number}" if number else f"ended with exit code {status >> 8}{NO_MESSAGE}"


def find_launcher() -> psutil.Process:
    """Return what started the ranks of this host, usually torchrun: the nearest ancestor without LOCAL_RANK."""
    ancestors = psutil.Process().parents()
    for process in ancestors:
        try:
            if "LOCAL_RANK" not in process.environ():
                return process
        except psutil.Error:
            return process  # another user's, so no rank of ours
    return ancestors[-1] if ancestors else psutil.Process()


@dataclass(slots=True)
class SilenceCounter:
    """Counts missed beats, not seconds: a listener that was itself stopped in the meantime missed none."""

    pid: int
    stopped_beats: int  # how many may be missed while the process is stopped
    silent_beats: int  # how many may be missed at all: a busy machine, or a lock in the kernel, takes time
    missed: int = 0

    def heard(self) -> None:
        """Start again: a beat came."""
        self.missed = 0

    def miss(self) -> str:
        """Count a second without a beat; return what is wrong, in words, or ""."""
        self.missed += 1
        if self.missed >= self.stopped_beats and is_stopped(self.pid):
            return STOPPED
        return f"was silent for {self.missed} s" if self.missed >= self.silent_beats else ""


@dataclass(slots=True)
class StoppedProcesses:
    """Counts how often in a row processes are seen stopped."""

    beats: int = 10  # how often before it is reported
    _seen: dict[int, int] = field(default_factory=dict)

    def look(self, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
        """Return the processes that have just been stopped for that long. Call it once a second."""
        stopped = [each for each in processes if is_stopped(each.pid)]
        self._seen = {each.pid: self._seen.get(each.pid, 0) + 1 for each in stopped}
        return [each for each in stopped if self._seen[each.pid] == self.beats]
