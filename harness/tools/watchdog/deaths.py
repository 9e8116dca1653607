"""How a process of this host that is not our child ended, and whether the kernel killed it for want of memory."""

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

from harness.runtime.processes import wait_status

COUNTS = 4  # how many looks, one a second, before a death was noticed its cgroup may have counted it
# From <linux/pidfd.h> of Linux 6.15: the request, its flag for the exit code, and struct pidfd_info, whose first field
# has the flags and whose last one has the code. The request's number contains the size of the structure.
_PIDFD_INFO_EXIT, _PIDFD_INFO = 1 << 3, struct.Struct("QQ11Ii")
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11


class ExitWatch:
    """Notes how a process ends, at that moment: torchrun waits for a rank that it ends, and then /proc forgets it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None  # as waitpid() gives it; None while it is alive, and if nothing tells any more
        self.over = threading.Event()  # set at its end, and if it cannot be watched
        threading.Thread(target=self._wait, name=f"exit of {pid}", daemon=True).start()

    def _wait(self) -> None:
        with suppress(OSError):  # it has ended, or this kernel has no pidfd
            descriptor = os.pidfd_open(self.pid)
            select.select([descriptor], [], [])
            status = wait_status(self.pid)
            self.status = status_after_reaping(descriptor) if status is None else status
            os.close(descriptor)
        self.over.set()


def in_words(status: int) -> str:
    """Return "was killed by SIGKILL" or the like. status: as waitpid() gives it."""
    if number := status & 0x7F:
        return f"was killed by {Signals(number).name if number in list(Signals) else f'signal {number}'}"
    return f"ended with exit code {status >> 8}, without an error message"


def status_after_reaping(pidfd: int) -> int | None:
    """Return the status of a process whose parent has waited for it; None before that, and before Linux 6.15.

    pidfd: a descriptor from os.pidfd_open(), made while the process existed.
    """
    try:
        answer = fcntl.ioctl(pidfd, _PIDFD_GET_INFO, _PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    except OSError:  # before 6.15; or the process has ended, and nobody has waited for it
        return None
    flags, *_, status = _PIDFD_INFO.unpack(answer)
    return int(status) if flags & _PIDFD_INFO_EXIT else None


@dataclass(slots=True)
class MemoryKills:
    """Evidence that the kernel's out-of-memory killer sent a process SIGKILL, as any process may.

    That is: the count of the process's cgroup, which must be found while it is alive, rose at its death. A rank may
    report the death of its engine's process much later, at its next call, so the counts are kept as they were at the
    death.
    """

    root: Path = Path("/")
    _files: dict[int, Path] = field(default_factory=dict)  # pid, alive at the last look -> where its cgroup's count is
    _counts: dict[Path, deque[int]] = field(default_factory=dict)  # the last ones
    # pid -> the file of its cgroup, its count before the death, and the count at the death
    _at_death: dict[int, tuple[Path, int, int]] = field(default_factory=dict)
    _explained: dict[Path, int] = field(default_factory=dict)  # the count up to which each kill has explained a death

    def look(self, alive: Iterable[int]) -> None:
        """Note the cgroups of these processes, what they count, and which processes are gone since the last look."""
        found = {pid: file for pid in alive if (file := self._file_of(pid))}
        for pid in self._files.keys() - found.keys():
            self._note_death(pid)
        self._files = found
        for file in set(found.values()):
            self._counts.setdefault(file, deque(maxlen=COUNTS)).append(_count(file))

    def killed(self, pid: int) -> str:
        """Return the evidence, in words, that the kernel killed this process, which is dead; "" if none."""
        if pid in self._files:
            self._note_death(pid)
        if pid not in self._at_death:
            return ""
        file, before, at_death = self._at_death.pop(pid)
        before = max(before, self._explained.get(file, 0))
        if at_death <= before:
            return ""
        self._explained[file] = before + 1  # each kill explains one death
        return f"the out-of-memory killer has just struck in its cgroup (see {file})"

    def _file_of(self, pid: int) -> Path | None:
        """Return where its cgroup counts kills.

        Linux shows a process that is exiting in the top group: keep the earlier one.
        """
        file, known = _count_file(self.root, pid), self._files.get(pid)
        return known if known and file and known.is_relative_to(file.parent) else file

    def _note_death(self, pid: int) -> None:
        file = self._files.pop(pid)
        self._at_death[pid] = (file, self._counts[file][0], _count(file))


def _count_file(root: Path, pid: int) -> Path | None:
    """Return where the innermost cgroup that accounts this process's memory counts kills; None if there is none."""
    groups = [line.split(":", 2)[1:] for line in _lines(root / f"proc/{pid}/cgroup")]
    # The first version, which alone accounts memory where it does, and the second.
    for controller, folder, name in (("memory", "memory", "memory.oom_control"), ("", "", "memory.events")):
        group = next((path for controllers, path in groups if controller in controllers.split(",")), None)
        if group is not None:
            # In a container the path may be the host's, of which only the innermost part is mounted.
            base = root / "sys/fs/cgroup" / folder
            return next(filter(Path.exists, (base / group.lstrip("/") / name, base / name)), None)
    return None


def _count(file: Path) -> int:
    return next((int(line.split()[1]) for line in _lines(file) if line.startswith("oom_kill ")), 0)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
