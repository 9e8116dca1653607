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

from harness.rollout.processes import shared_memory_files

FOLDER = Path("/dev/shm")
_OF_TORCH = re.compile(r"torch_(\d+)_")
"""torch names a file after the process that made it."""


def _listing() -> dict[str, int]:
    """Name -> inode."""
    with os.scandir(FOLDER) as files:
        return {file.name: file.inode() for file in files}


@dataclass(slots=True)
class SharedMemory:
    """What appeared there since this was made, and is mapped by, or named after, a process of ours."""

    before: dict[str, int] = field(default_factory=_listing)
    """Never ours, while the inode is the same."""
    ours: dict[str, int] = field(default_factory=dict)
    pids: set[int] = field(default_factory=set)
    """Of all processes of ours that were ever seen."""

    def look(self, pids: Iterable[int]) -> None:
        """Note what these processes of ours map. Reads their maps only where there is a file whose owner is not known."""
        pids = set(pids)
        self.pids |= pids
        unknown = {
            name: inode
            for name, inode in _listing().items()
            if inode not in (self.before.get(name), self.ours.get(name))
        }
        if unknown:
            mapped = {file.name for file in shared_memory_files(pids)}
            self.ours |= {name: inode for name, inode in unknown.items() if name in mapped or self._is_torchs(name)}

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
        used = {file.name for file in shared_memory_files(set(psutil.pids()) - self.pids)}
        for name in left - used:
            with suppress(FileNotFoundError):
                (FOLDER / name).unlink()
        return sorted(left - used)

    def _is_torchs(self, name: str) -> bool:
        match = _OF_TORCH.match(name)
        return match is not None and int(match[1]) in self.pids
