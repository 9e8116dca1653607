"""Processes of this host that are not our children: who started whom, how each ended, which the kernel killed."""

import fcntl
import os
import select
import struct
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals

import psutil

from harness.runtime.errors import SPEAKS_LAST
from harness.runtime.processes import is_alive

MARK = "HARNESS_WATCHDOG"
"""Variable that every process which a rank starts inherits: the name of its watchdog."""
STOPPED = "is stopped (SIGSTOP, or a debugger)"
NO_MESSAGE = ", without an error message"
COUNTS = 4  # how many looks, one a second, before a death was noticed its cgroup may have counted it

_STATE, _PARENT, _EXIT_CODE = 0, 1, 49  # fields of /proc/PID/stat, counted from 0 after the name
# Of struct pidfd_info, 64 bytes in its first version: a mask, and last the exit code.
_PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the name, state first; none once the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def started_at(pid: int) -> int:
    """Return the start time in clock ticks since boot: with its pid, no other process's."""
    return int(stat_fields(pid)[19])


def is_stopped(pid: int) -> bool:
    """Return whether the process got SIGSTOP, or a debugger holds it."""
    return stat_fields(pid)[:1] in (["T"], ["t"])


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
            for pid in set(children.get(parent, [])) - seen:
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


class ExitWatch:
    """Notes how a process ends, at that moment: torchrun reaps ten times a second, and /proc forgets."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.how: str | None = None  # as from how_it_ended; None while it is alive, or if that was not seen
        self.over = threading.Event()  # set at its end, and if it cannot be watched
        threading.Thread(target=self._wait, name=f"exit of {pid}", daemon=True).start()

    def _wait(self) -> None:
        with suppress(OSError):  # it has ended, or this kernel has no pidfd
            descriptor = os.pidfd_open(self.pid)
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
            self.how = how_it_ended(self.pid) or _how_by_kernel(descriptor)
            os.close(descriptor)
        self.over.set()


def _how_by_kernel(descriptor: int) -> str | None:
    """Return how a process ended that has been reaped already, which Linux reports since 6.15; else None."""
    info = bytearray(struct.pack("Q56x", _PIDFD_INFO_EXIT))
    with suppress(OSError):
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info)
        mask, status = struct.unpack_from("Q52xi", info)
        return describe_status(status) if mask & _PIDFD_INFO_EXIT else None
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

    That is: the count of the process's cgroup, which must be found while it is alive, rose at its death.
    """

    root: Path = Path("/")
    _files: dict[int, Path] = field(default_factory=dict)  # pid -> where its cgroup's count is
    _counts: dict[Path, deque[int]] = field(default_factory=dict)  # the last ones

    def look(self, pids: Iterable[int]) -> None:
        """Note the cgroups of these processes, and what they count."""
        for pid in pids:
            if file := _count_file(self.root, pid):
                self._files[pid] = file
        for file in set(self._files.values()):
            self._counts.setdefault(file, deque(maxlen=COUNTS)).append(_count(file))

    def killed(self, pid: int) -> str:
        """Return the evidence, in words, that the kernel killed this process, which has just died; "" if none."""
        file = self._files.get(pid)
        if file is None or _count(file) <= self._counts[file][0]:
            return ""
        self._counts[file] = deque([self._counts[file][0] + 1], maxlen=COUNTS)  # each kill explains one death
        return f"the out-of-memory killer has just struck in its cgroup (see {file})"


def _count_file(root: Path, pid: int) -> Path | None:
    """Return where the innermost cgroup that accounts this process's memory counts kills; None if there is none."""
    group, top, name = "", "", "memory.events"
    if not (lines := _lines(root / f"proc/{pid}/cgroup")):
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):  # cgroup v1, which alone accounts memory then
            group, top, name = path, "memory", "memory.oom_control"
            break
        if controllers == "":
            group = path
    base = root / "sys/fs/cgroup" / top
    # In a container the path may be the host's, of which only the innermost part is mounted.
    return next((folder / name for folder in (base / group.lstrip("/"), base) if (folder / name).exists()), None)


def _count(file: Path) -> int:
    return next((int(line.split()[1]) for line in _lines(file) if line.startswith("oom_kill ")), 0)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
