"""Files in /dev/shm that a run's processes made: known while these live, so that they can be removed when all are dead.

A process that is killed removes none of its own, and nobody else knows whose they are.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from harness.runtime.processes import shared_memory_files

FOLDER = Path("/dev/shm")
_OF_TORCH = re.compile(r"torch_(\d+)_")
"""torch names a file after the process that made it."""


def _listing() -> dict[str, int]:
    """Name -> inode."""
    with os.scandir(FOLDER) as files:
        return {file.name: file.inode() for file in files}


def _used_by(pids: Iterable[int]) -> set[str]:
    """Names of the files that these processes map or have open, of those that may be asked."""
    pids = set(pids)
    names = {file.name for file in shared_memory_files(pids)}
    for pid in pids:
        with suppress(OSError):  # it has ended, or is another user's
            for link in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):  # closed meanwhile
                    folder, _, name = os.readlink(link.path).rpartition("/")
                    names |= {name} if folder == str(FOLDER) else set()
    return names


@dataclass(slots=True)
class SharedMemory:
    """What appeared there since this was made, and is used by, or named after, a process of ours."""

    before: dict[str, int] = field(default_factory=_listing)
    """Never ours, while the inode is the same."""
    ours: dict[str, int] = field(default_factory=dict)
    theirs: dict[str, int] = field(default_factory=dict)
    """What nobody of ours used when it was new: its maker maps a file at once."""
    pids: set[int] = field(default_factory=set)
    """Of all processes of ours that were ever seen."""
    _seen: dict[str, int] = field(default_factory=dict)

    def look(self, pids: Iterable[int]) -> None:
        """Note what these processes of ours map. Reads their maps only where there is a file whose owner is not known."""
        pids = set(pids)
        self.pids |= pids
        known = set((self.before | self.theirs | self.ours).items())
        unknown = dict(set(_listing().items()) - known)
        if unknown:
            mapped = _used_by(pids)
            for name, inode in unknown.items():
                is_ours = name in mapped or self._is_torchs(name)
                (self.ours if is_ours else self._doubtful(name, inode))[name] = inode

    def _doubtful(self, name: str, inode: int) -> dict[str, int]:
        """Where to note it: at first sight it may be a moment old, and not mapped yet."""
        return self.theirs if self._seen.get(name) == inode else self._seen

    def remove(self) -> list[str]:
        """Once our processes are dead: unlink what is still there and which no other process maps; returns the names."""
        here = _listing()
        left = {
            name
            for name, inode in here.items()
            if inode != self.before.get(name) and (self.ours.get(name) == inode or self._is_torchs(name))
        }
        if not left:
            return []
        used = _used_by(set(psutil.pids()) - self.pids)
        for name in left - used:
            with suppress(FileNotFoundError):
                (FOLDER / name).unlink()
        return sorted(left - used)

    def _is_torchs(self, name: str) -> bool:
        match = _OF_TORCH.match(name)
        return match is not None and int(match[1]) in self.pids
