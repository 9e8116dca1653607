"""The launcher's side of phase_client.py: one Unix socket for each host, which crosses network namespaces."""

import contextlib
import json
import selectors
import socket
from collections.abc import Callable
from pathlib import Path

from harness.tools.hosts.phase_client import GO

READ_BYTES = 1 << 16


class Door:
    """Answers each phase_client with "go" once `begins(phase, step)` has returned. Driven by the selector: data is a callable."""

    def __init__(self, path: Path, selector: selectors.BaseSelector, begins: Callable[[str, int | None], None]) -> None:
        self._selector = selector
        self._begins = begins
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1024)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        visitor, _ = self._listener.accept()
        visitor.setblocking(False)
        said = bytearray()
        self._selector.register(visitor, selectors.EVENT_READ, lambda: self._hear(visitor, said))

    def _hear(self, visitor: socket.socket, said: bytearray) -> None:
        try:
            data = visitor.recv(READ_BYTES)
        except ConnectionResetError:
            data = b""
        said += data
        if data and not said.endswith(b"\n"):
            return
        if data:
            phase_client = json.loads(said)
            self._begins(phase_client["phase"], phase_client["step"])
            with contextlib.suppress(BrokenPipeError):  # it was killed while it waited, perhaps by this very harm
                visitor.send(GO)
        self._selector.unregister(visitor)
        visitor.close()
