"""Where the ranks of a host come to its watchdog: who may, and as which rank."""

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from harness.tools.watchdog import private_socket
from harness.tools.watchdog.deaths import Death
from harness.tools.watchdog.launcher import Launcher
from harness.tools.watchdog.local_rank import LocalRank
from harness.tools.watchdog.messages import MalformedError


@dataclass(slots=True)
class RankListener:
    """The ranks that have come, and the socket at which the others may."""

    socket: socket.socket
    folder: Path
    """Of the socket; removed once all have come."""
    launcher: Launcher
    world_size: int
    local_world_size: int
    ranks: list[LocalRank] = field(default_factory=list)
    last: float = field(default_factory=time.monotonic)
    """When one came last."""

    def accept(self) -> list[LocalRank]:
        """Return who has connected, not known as any rank yet; none where it is another user's, or has gone again."""
        with suppress(OSError):
            line, _ = self.socket.accept()
            if private_socket.is_ours(line):
                line.setblocking(False)
                self.last = time.monotonic()
                return [LocalRank(line, self.last, private_socket.peer_of(line).pid)]
            line.close()
        return []

    def admit(self, rank: LocalRank, number: int, handler: int | None) -> None:
        """It has said which rank it is. Raises MalformedError where it cannot be that, or is no process of this torchrun."""
        if not 0 <= number < self.world_size or any(each.rank == number for each in self.ranks):
            raise MalformedError(f"rank {number}, which is not to come")
        with suppress(psutil.NoSuchProcess):  # it has died already, which is about to be seen
            rank.process = psutil.Process(rank.pid)
            ancestors = {each.pid for each in rank.process.parents()}
            if self.launcher.lives() and self.launcher.pid not in ancestors:
                raise MalformedError("a process that is not torchrun's")
        rank.rank, rank.handler = number, handler
        rank.death = Death(rank.pid).watch()
        self.ranks.append(rank)
        rank.send({"watchdogs": [os.getpid(), os.getppid()]})
        if len(self.ranks) == self.local_world_size:
            self.close()

    def close(self) -> None:
        """Leave no file."""
        private_socket.remove(self.folder)
