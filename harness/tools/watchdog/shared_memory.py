"""Files in /dev/shm that a run's processes made, noted while these are alive, to be removed when all are dead.

A process that is killed removes none of its own, and afterwards nothing says whose they are.
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
_TORCH_FILE = re.compile(r"torch_(\d+)_")  # torch puts the pid of the process that made a file into its name


def _inodes() -> dict[str, int]:
    with os.scandir(FOLDER) as files:
        return {file.name: file.inode() for file in files}


def _used_by(pids: Iterable[int]) -> set[str]:
    """Return the names of the files that these processes map or have open, as far as that can be read."""
    pids = set(pids)
    names = {file.name for file in shared_memory_files(pids)}
    for pid in pids:
        with suppress(OSError):  # it has ended, or is another user's
            for link in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):  # closed in the meantime
                    folder, _, name = os.readlink(link.path).rpartition("/")
                    names |= {name} if folder == str(FOLDER) else set()
    return names


@dataclass(slots=True)
class SharedMemoryFiles:
    """The files that appeared since this was made and are used by, or named after, a process of ours."""

    before: dict[str, int] = field(default_factory=_inodes)  # name -> inode: never ours while the inode is the same
    ours: dict[str, int] = field(default_factory=dict)
    theirs: dict[str, int] = field(default_factory=dict)  # not used by us when new: its maker maps a file at once
    pids: set[int] = field(default_factory=set)  # of all processes of ours that were ever seen
    _seen_once: dict[str, int] = field(default_factory=dict)

    def look(self, pids: Iterable[int]) -> None:
        """Note what these processes of ours map; read their maps only if there is a file of unknown owner."""
        pids = set(pids)
        self.pids |= pids
        known = set((self.before | self.theirs | self.ours).items())
        if unknown := set(_inodes().items()) - known:
            mapped = _used_by(pids)
            for name, inode in unknown:
                if name in mapped or self._is_of_torch(name):
                    self.ours[name] = inode
                elif self._seen_once.get(name) == inode:
                    self.theirs[name] = inode
                else:  # it may be a moment old, and not mapped yet
                    self._seen_once[name] = inode

    def remove(self) -> list[str]:
        """Unlink, once our processes are dead, what no other process uses; return the names."""
        left = {
            name
            for name, inode in _inodes().items()
            if inode != self.before.get(name) and (self.ours.get(name) == inode or self._is_of_torch(name))
        }
        left -= _used_by(set(psutil.pids()) - self.pids) if left else set()
        for name in left:
            with suppress(FileNotFoundError):
                (FOLDER / name).unlink()
        return sorted(left)

    def _is_of_torch(self, name: str) -> bool:
        match = _TORCH_FILE.match(name)
        return match is not None and int(match[1]) in self.pids
