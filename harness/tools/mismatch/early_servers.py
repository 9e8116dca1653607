"""The processes of changed engines, started before their turn: on a GPU each imports SGLang itself, which takes most of a start.

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

    def __init__(self, run: RunContext, changes: Sequence[EngineChange], *, is_head: bool) -> None:
        """Prepare nothing yet. is_head: whether this rank has a part in changes that one rank serves alone."""
        self._run, self._is_head = run, is_head
        self._changes = deque(changes)
        self._started = deque[list[ForkServer]]()

    def prepare(self, engines: int = AHEAD) -> None:
        """Start the processes of that many of the next engines. Call it between engines: one ends all that is started after it."""
        while self._changes and len(self._started) < engines:
            self._started.append(self._start(self._changes.popleft()))

    def take(self) -> list[ForkServer]:
        """Return the fork servers for the next engine, after having started those that follow it."""
        self.prepare(1 + AHEAD)
        early = self._started.popleft()
        return cloned(self._run.servers) or early

    def _start(self, change: EngineChange) -> list[ForkServer]:
        device = self._run.world.device_type
        if device == "cpu" or change.config.engine.start == "spawn" or (change.alone and not self._is_head):
            return []
        return start_servers(change.config, device, os.environ)


def cloned(servers: Sequence[ForkServer]) -> list[ForkServer]:
    """Return fork servers for one engine, and keep the originals for the next one.

    There are none on a GPU, where nothing can be forked, and none once an engine has died and taken them along. SGLang then
    starts its processes itself.
    """
    found = []
    for server in servers:
        with suppress(ServerGone):
            if server.imported().forks:
                found.append(server.clone())
    return found
