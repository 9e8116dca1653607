"""A rank's side of a fault at a phase: it reports the phase to launch/hosts.py and waits until it may continue."""

import json
import socket
from collections.abc import Callable

from harness.cluster.world import Launch
from harness.config.schema import Config
from harness.runtime.observer import Observer
from harness.runtime.phases import MEET

PHASE_SOCKET = "HARNESS_EMULATOR"
"""Variable: the socket that launch/hosts.py serves; set only where a host is to fail at a phase."""
GO = b"go\n"


class EmulatedHost(Observer):
    """Report each phase of this rank before its work begins."""

    def __init__(self, path: str, flush: Callable[[], None]) -> None:
        """flush: returns once the other hosts know this rank's phase."""
        self.path, self.flush, self.rank = path, flush, -1

    def launched(self, config: Config, launch: Launch) -> None:
        self.rank = launch.rank

    def phase_begins(self, phase: str, step: int | None) -> None:
        """Report the phase and wait for the answer. Raise ConnectionError where launch/hosts.py closes the socket."""
        if phase == MEET:
            return  # the other hosts cannot know of it yet
        self.flush()
        line = {"rank": self.rank, "host": socket.gethostname(), "phase": phase, "step": step}
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(self.path)
            server.sendall(json.dumps(line).encode() + b"\n")
            if server.recv(len(GO), socket.MSG_WAITALL) != GO:
                raise ConnectionError(f"launch/hosts.py closed {self.path} without an answer to phase {phase}.")
