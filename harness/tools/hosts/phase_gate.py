"""Faults at a phase: each rank reports a phase before its work begins, and waits for launch/hosts.py to answer.

One Unix socket for each host, in a folder of mode 0700: it crosses network namespaces. A report is a packet of JSON.
"""

import contextlib
import json
import os
import selectors
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.observer import Observer
from harness.runtime.events import MEET

PHASE_SOCKET = "HARNESS_EMULATOR"
"""Variable: the socket that launch/hosts.py serves; set only where a host is to fail at a phase."""
HOST_FAULTS = "HARNESS_HOST_FAULTS"
"""Variable: what launch/hosts.py will do to hosts, such as "kill host1@12s", for the verdict on a lost one."""
GO = b"go"
REPORT_BYTES = 1 << 12


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield another path of a socket: its own may have more than the 107 bytes of a Unix address, below a long
    TMPDIR.
    """
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class EmulatedHost(Observer):
    """Report each phase of this rank before its work begins."""

    def __init__(self, path: str, flush: Callable[[], None]) -> None:
        """flush: returns once the other hosts know this rank's phase."""
        self.path, self.flush = Path(path), flush

    def phase_begins(self, phase: str, step: int | None) -> None:
        """Report the phase and wait for the answer. Raise ConnectionError where launch/hosts.py closes the socket."""
        if phase == MEET:
            return  # the other hosts cannot know of it yet
        self.flush()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            with _short(self.path) as path:
                server.connect(path)
            server.send(json.dumps([phase, step]).encode())
            if server.recv(len(GO)) != GO:
                raise ConnectionError(f"launch/hosts.py closed {self.path} without an answer to phase {phase}.")


class PhaseServer:
    """Answer each report once `begins(phase, step)` has returned. Driven by the selector, whose data is a callable."""

    def __init__(self, path: Path, selector: selectors.BaseSelector, begins: Callable[[str, int | None], None]) -> None:
        self._selector, self._begins = selector, begins
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with _short(path) as name:
            self._listener.bind(name)
        self._listener.listen(1024)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        self._selector.register(client, selectors.EVENT_READ, lambda: self._answer(client))

    def _answer(self, client: socket.socket) -> None:
        self._selector.unregister(client)
        with client:
            if report := client.recv(REPORT_BYTES):
                self._begins(*json.loads(report))
                with contextlib.suppress(BrokenPipeError):  # it was killed while it waited, perhaps by this very fault
                    client.send(GO)
