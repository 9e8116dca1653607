"""Processes of this host that are not our children: who started whom, how each ended, which are stopped or hang."""

import fcntl
import os
import re
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
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
TOGETHER_SECONDS = 3.0  # how long before a death was noticed its cgroup may have counted it
FIRST_PID_NAMESPACE = "pid:[4026531836]"  # that of the pids in the kernel's log
_RECORD = re.compile(r"\bKilled process (\d+) ")


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
    number = status & 0x7F
    if number in list(Signals):
        return f"was killed by {Signals(number).name}"
    return f"was killed by signal {number}" if number else f"ended with exit code {status >> 8}{NO_MESSAGE}"


@dataclass(slots=True)
class MemoryKills:
    """Evidence that the kernel's out-of-memory killer sent a process SIGKILL, as any process may.

    Either the count of the process's cgroup, which must be seen while it is alive, rose at its death, or the kernel's
    log names its pid.
    """

    root: Path = Path("/")
    now: Callable[[], float] = time.monotonic
    _groups: dict[int, str] = field(default_factory=dict)  # the memory cgroup of each process that was seen
    _counts: dict[str, deque[tuple[float, int]]] = field(default_factory=dict)
    """When each cgroup's count was read, and the count; the oldest is from before TOGETHER_SECONDS."""
    _files: dict[str, Path | None] = field(default_factory=dict)
    """Where each cgroup's count is; found once, as the search would find another's after its removal."""
    _log: int | None = None  # descriptor of the kernel's log from now on, if it may be read and its pids are ours
    _killed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        with suppress(OSError):
            if os.readlink(self.root / "proc/self/ns/pid") == FIRST_PID_NAMESPACE:
                self._log = os.open(self.root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._log, 0, os.SEEK_END)  # earlier records are not of our processes

    def look(self, pids: Iterable[int]) -> None:
        """Note the cgroups of these processes, and what they count."""
        for pid in pids:
            if group := _memory_group(self.root, pid):
                self._groups[pid] = group
        for group in set(self._groups.values()):
            self._read_count(group)

    def killed(self, pid: int) -> str:
        """Return the evidence, in words, that the kernel killed this process, which has just died; "" if none."""
        if self._log is not None:
            with suppress(OSError):  # no more records, or none that can be read
                while record := os.read(self._log, 1 << 13):
                    self._killed |= {int(each) for each in _RECORD.findall(record.decode(errors="replace"))}
        if pid in self._killed:
            return f"the kernel's log says that its out-of-memory killer ended pid {pid}"
        group = self._groups.get(pid)
        counts = self._counts.get(group) if group else None
        before = counts[0][1] if counts else None
        count = self._read_count(group) if group else None
        if group is None or before is None or count is None or count <= before:
            return ""
        self._counts[group] = deque([(self.now(), before + 1)])  # each kill explains one death
        return f"the out-of-memory killer has just struck in its cgroup {group}"

    def _read_count(self, group: str) -> int | None:
        """Return how many processes of the cgroup were killed, and keep it."""
        file = self._files.setdefault(group, _count_file(self.root, group))
        lines = (line.partition(" ") for line in (_lines(file) if file else ()))
        count = next((int(value) for key, _, value in lines if key == "oom_kill" and value.strip().isdecimal()), None)
        if count is not None:
            counts, now = self._counts.setdefault(group, deque()), self.now()
            counts.append((now, count))
            while len(counts) > 1 and counts[1][0] <= now - TOGETHER_SECONDS:
                counts.popleft()
        return count


def _memory_group(root: Path, pid: int) -> str | None:
    """Return the innermost cgroup of a process that accounts its memory; None if there is none."""
    found = None
    for line in _lines(root / "proc" / str(pid) / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return path  # cgroup v1, which alone accounts memory then
        if controllers == "":
            found = path
    return found


def _count_file(root: Path, group: str) -> Path | None:
    for top, name in (("memory", "memory.oom_control"), ("", "memory.events")):
        base = root / "sys/fs/cgroup" / top
        # In a container the path may be the host's, of which only the innermost part is mounted.
        for folder in (base / group.lstrip("/"), base):
            if (folder / name).exists():
                return folder / name
    return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


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

    def miss(self) -> str:
        """Count a second without a beat; return what is wrong, in words, or ""."""
        self.missed += 1
        if self.missed >= self.stopped_beats and is_stopped(self.pid):
            return STOPPED
        return f"was silent for {self.missed} s" if self.missed >= self.silent_beats else ""
