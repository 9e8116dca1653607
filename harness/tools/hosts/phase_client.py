"""A rank's side of harm at a phase: it knocks before the phase's work begins, and waits until it may go on."""

import json
import socket
from collections.abc import Mapping

from harness.runtime.events import PhaseObserver

VARIABLE = "HARNESS_EMULATOR"
"""Names the socket that launch/hosts.py serves; set only where something is to be hurt at a phase."""
GO = b"go\n"


def phase_observer(environment: Mapping[str, str], rank: int) -> PhaseObserver | None:
    """What tells launch/hosts.py that this rank begins a phase, and waits for its answer; None where nobody asks."""
    path = environment.get(VARIABLE)
    if not path:
        return None

    def phase_client(phase: str, step: int | None) -> None:
        line = {"rank": rank, "host": socket.gethostname(), "phase": phase, "step": step}
        with socket.socket(socket.AF_UNIX) as door:
            door.connect(path)
            door.sendall(json.dumps(line).encode() + b"\n")
            if door.recv(len(GO), socket.MSG_WAITALL) != GO:
                raise ConnectionError(f"launch/hosts.py closed {path} without an answer to phase {phase}.")

    return phase_client
