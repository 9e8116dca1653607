"""Whether it was the kernel's out-of-memory killer that sent a process SIGKILL, as anyone may: only by evidence for that
process, its cgroup's own count just before and after its death, or the kernel's record of its pid."""

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path("/")
TOGETHER_SECONDS = 3.0
"""How long before a death was noticed its cgroup may have counted it."""
FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""Of the kernel's own pids, which its records have."""
_RECORD = re.compile(r"\bKilled process (\d+) ")


@dataclass(slots=True)
class MemoryKills:
    """Follows the cgroups of this process and of those that are named, which it must see while they live."""

    root: Path = ROOT
    now: Callable[[], float] = time.monotonic
    _groups: dict[int, str] = field(default_factory=dict)
    """The memory cgroup of each process that was seen."""
    _counts: dict[str, deque[tuple[float, int]]] = field(default_factory=dict)
    """Of each cgroup: when its count was read, and the count. The oldest is from before TOGETHER_SECONDS."""
    _files: dict[str, Path | None] = field(default_factory=dict)
    """Where each cgroup's count is; found once: another one's would do once it is removed."""
    _records: "KernelRecords | None" = None

    def __post_init__(self) -> None:
        """What the kernel has on record already is of no process of ours."""
        self._records = KernelRecords.open(self.root)

    def look(self, pids: Iterable[int]) -> None:
        """Note where these processes are, and what their cgroups count."""
        for pid in pids:
            if group := _group_of(self.root, str(pid)):
                self._groups[pid] = group
        for group in set(self._groups.values()):
            self._read(group)

    def killed(self, pid: int) -> str:
        """Return the evidence, in words, that it killed this process, which has just died; "" where there is none."""
        if self._records and pid in self._records.new():
            return f"the kernel's log says that its out-of-memory killer ended pid {pid}"
        group = self._groups.get(pid)
        if group is None:
            return ""
        earlier = self._counts.get(group)
        before = earlier[0][1] if earlier else None
        count = self._read(group)
        if before is None or count is None or count <= before:
            return ""
        self._counts[group] = deque([(self.now(), before + 1)])  # each kill explains one death
        return f"the out-of-memory killer has just struck in its cgroup {group}"

    def _read(self, group: str) -> int | None:
        file = self._files.setdefault(group, _file_of(self.root, group))
        count = _count(file) if file else None
        if count is None:
            return None
        counts, now = self._counts.setdefault(group, deque()), self.now()
        counts.append((now, count))
        while len(counts) > 1 and counts[1][0] <= now - TOGETHER_SECONDS:
            counts.popleft()
        return count


@dataclass(slots=True)
class KernelRecords:
    """The kernel's log from now on, where it may be read and its pids are ours."""

    descriptor: int
    pids: set[int] = field(default_factory=set)

    @classmethod
    def open(cls, root: Path) -> "KernelRecords | None":
        """None where there is none to be had."""
        with suppress(OSError):
            if os.readlink(root / "proc/self/ns/pid") != FIRST_PID_NAMESPACE:
                return None
            descriptor = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with suppress(OSError):  # a file, in a test
                os.lseek(descriptor, 0, os.SEEK_END)
            return cls(descriptor)
        return None

    def new(self) -> set[int]:
        """Return the pids of all that it has killed since this was opened."""
        with suppress(OSError):  # no more, or none that can be read
            while record := os.read(self.descriptor, 1 << 13):
                self.pids |= {int(pid) for pid in _RECORD.findall(record.decode(errors="replace"))}
        return self.pids


def _group_of(root: Path, pid: str) -> str | None:
    """The innermost cgroup of a process that accounts its memory, as /proc names it; None where it has none."""
    found = None
    for line in _lines(root / "proc" / pid / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return path  # of the first version, which alone accounts then
        if controllers == "":
            found = path
    return found


def _file_of(root: Path, group: str) -> Path | None:
    """The file with its counts."""
    for top, name in (("memory", "memory.oom_control"), ("", "memory.events")):
        base = root / "sys/fs/cgroup" / top
        # Inside of a container the path may be the host's, of which only the innermost part is mounted.
        for folder in (base / group.lstrip("/"), base):
            if (folder / name).exists():
                return folder / name
    return None


def _count(file: Path) -> int | None:
    """How many processes were killed there."""
    for line in _lines(file):
        key, _, value = line.partition(" ")
        if key == "oom_kill" and value.strip().isdecimal():
            return int(value)
    return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
