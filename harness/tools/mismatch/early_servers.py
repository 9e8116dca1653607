"""The processes of changed engines, started before their turn: on a GPU each imports SGLang itself, which takes most of
a start.

On a CPU they are forked from the run's own fork servers, which have imported it once.
"""

import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from harness.observer import RunContext
from harness.rollout.early_start import start_servers
from harness.runtime.fork_server import ForkServer, ServerGone
from harness.tools.mismatch.sources import EngineChange

AHEAD = 2
"""How many engines are prepared beyond the one that starts. Their processes hold some memory of the GPU."""


class EarlyServers:
    """The fork servers of the engines to come, in order, on one rank."""

    def __init__(
        self, run: RunContext, changes: Sequence[EngineChange], started: Sequence[ForkServer], *, is_head: bool
    ) -> None:
        """Prepare nothing yet. started: of the run. is_head: whether this rank has a part in changes that one rank
        serves alone.
        """
        self._run, self._started_by_run, self._is_head = run, started, is_head
        self._changes = deque(changes)
        self._started = deque[list[ForkServer]]()

    def prepare(self, engines: int = AHEAD) -> None:
        """Start the processes of that many of the next engines.

        Call it while no engine runs: one that ends takes along all processes that were started after it.
        """
        while self._changes and len(self._started) < engines:
            self._started.append(self._start(self._changes.popleft()))

    def hand_over(self) -> None:
        """Leave the next engine its fork servers. First start those of the engines after it."""
        self.prepare(1 + AHEAD)
        early = self._started.popleft()
        ForkServer.hand_over(cloned(self._started_by_run) or early)

    def _start(self, change: EngineChange) -> list[ForkServer]:
        device = self._run.world.device_type
        if device == "cpu" or change.config.engine.start == "spawn" or (change.alone and not self._is_head):
            return []
        return start_servers(change.config, device, os.environ)


def cloned(servers: Sequence[ForkServer]) -> list[ForkServer]:
    """Return copies of these fork servers for one engine, so that the next engine can have copies too.

    The list is empty on a GPU, where no server can fork, and after the death of an engine, which ends the servers as
    well. Then SGLang starts the engine's processes itself, unless they were started early.
    """
    found = []
    for server in servers:
        with suppress(ServerGone):
            if server.imported().forks:
                found.append(server.clone())
    return found
