"""Faults at a phase: each rank reports a phase before its work begins, and waits for launch/hosts.py to answer.

One Unix socket for each host, in a folder of mode 0700: it crosses network namespaces. A report is a line of JSON.
"""

import contextlib
import json
import selectors
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from harness.runtime.observer import Observer
from harness.runtime.phases import MEET

if TYPE_CHECKING:  # the launcher starts without torch
    from harness.cluster.world import Launch
    from harness.config.schema import Config

PHASE_SOCKET = "HARNESS_EMULATOR"
"""Variable: the socket that launch/hosts.py serves; set only where a host is to fail at a phase."""
GO = b"go\n"
READ_BYTES = 1 << 16


class EmulatedHost(Observer):
    """Report each phase of this rank before its work begins."""

    def __init__(self, path: str, flush: Callable[[], None]) -> None:
        """flush: returns once the other hosts know this rank's phase."""
        self.path, self.flush, self.rank = path, flush, -1

    def launched(self, config: "Config", launch: "Launch") -> None:
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


class PhaseServer:
    """Answer each report once `begins(phase, step)` has returned. Driven by the selector, whose data is a callable."""

    def __init__(self, path: Path, selector: selectors.BaseSelector, begins: Callable[[str, int | None], None]) -> None:
        self._selector, self._begins = selector, begins
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1024)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        client.setblocking(False)
        received = bytearray()
        self._selector.register(client, selectors.EVENT_READ, lambda: self._receive(client, received))

    def _receive(self, client: socket.socket, received: bytearray) -> None:
        data = b""
        with contextlib.suppress(ConnectionResetError):
            data = client.recv(READ_BYTES)
        received += data
        if data and not received.endswith(b"\n"):
            return
        if data:
            report = json.loads(received)
            self._begins(report["phase"], report["step"])
            with contextlib.suppress(BrokenPipeError):  # it was killed while it waited, perhaps by this very fault
                client.send(GO)
        self._selector.unregister(client)
        client.close()
