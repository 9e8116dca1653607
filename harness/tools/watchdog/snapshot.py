"""What a watchdog tells its standby once a second: all that this would have to end, and to say, in its place."""

import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path

import psutil

from harness.runtime.processes import started_at
from harness.tools.watchdog.failure import Failure, Place
from harness.tools.watchdog.shared_memory import SharedMemory

LARGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Of one host."""

    folder: Path | None = None
    """The run's."""
    ranks: dict[int, tuple[int, Place]] = field(default_factory=dict)
    """Those that are there: pid, and place."""
    started: dict[int, int] = field(default_factory=dict)
    """When each process of the run started, by pid: no other process's."""
    shared: dict[str, int] = field(default_factory=dict)
    """Name and inode of the files in /dev/shm."""
    failures: tuple[Failure, ...] = ()

    @classmethod
    def of(
        cls,
        folder: Path | None,
        ranks: Mapping[int, tuple[int, Place]],
        processes: Mapping[int, psutil.Process],
        shared: SharedMemory,
        failures: Sequence[Failure],
    ) -> "Snapshot":
        """As it is now."""
        started = {}
        for pid in [*(pid for pid, _ in ranks.values()), *processes]:
            with suppress(IndexError):  # it has just ended
                started[pid] = started_at(pid)
        return cls(folder, dict(ranks), started, dict(shared.ours), tuple(failures))

    def send(self, line: socket.socket) -> None:
        """To the standby; nothing waits for it."""
        said = {
            "folder": str(self.folder) if self.folder else None,
            "ranks": {rank: [pid, astuple(place)] for rank, (pid, place) in self.ranks.items()},
            "started": self.started,
            "shared": self.shared,
            "failures": [each.as_json() for each in self.failures],
        }
        with suppress(OSError):  # it is gone, or stopped, and ends nothing
            line.send(json.dumps(said).encode(), socket.MSG_DONTWAIT)

    @classmethod
    def from_line(cls, data: bytes) -> "Snapshot":
        """What send sent."""
        said = json.loads(data)
        return cls(
            Path(said["folder"]) if said["folder"] else None,
            {int(rank): (pid, Place(*place)) for rank, (pid, place) in said["ranks"].items()},
            {int(pid): ticks for pid, ticks in said["started"].items()},
            said["shared"],
            tuple(Failure.from_json(each) for each in said["failures"]),
        )

    def processes(self) -> dict[int, psutil.Process]:
        """Those that are still there, ranks and all else."""
        found = {}
        for pid, ticks in self.started.items():
            with suppress(IndexError, psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if started_at(pid) == ticks:
                    found[pid] = process
        return found
