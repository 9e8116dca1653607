"""Evidence that it was the kernel's out-of-memory killer that sent a process SIGKILL, as any process may.

Either the count of the process's cgroup rose at its death, or the kernel's log names its pid.
"""

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path("/")
TOGETHER_SECONDS = 3.0  # how long before a death was noticed its cgroup may have counted it
FIRST_PID_NAMESPACE = "pid:[4026531836]"  # that of the pids in the kernel's log
_RECORD = re.compile(r"\bKilled process (\d+) ")


@dataclass(slots=True)
class MemoryKills:
    """Follows the cgroups of processes, which it must see while they are alive, and the kernel's log."""

    root: Path = ROOT
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
