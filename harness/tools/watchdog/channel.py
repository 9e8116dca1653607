"""The channel from the ranks of a host to their watchdog: a private Unix socket, and the messages that may come over
it.

The socket is in a folder that no other user can enter, and the kernel's credentials are checked at both ends. A message
is a packet with a JSON object, which is checked field by field.
"""

import os
import socket
import stat
import struct
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from harness.tools.watchdog.failures import Node

BASE = Path("/dev/shm")  # every host has it, and it is not a disk that may be full
FILE = "ranks"
LONGEST_MESSAGE = 1 << 18  # bytes: more than what the kernel lets an unprivileged process send in one packet


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchdogSettings:
    """What a watchdog must know about the run; the same for all ranks of a torchrun."""

    host: str  # name for people
    world_size: int
    local_world_size: int
    idle_seconds: float  # a rank may be so long between two phases
    heartbeat_timeout: float
    stopped_seconds: float  # a process may be stopped for so long while its rank waits
    name: str = ""  # of the watchdog
    launcher: int = 0  # pid of what started the ranks, usually torchrun
    is_torchrun: bool = False  # whether the watchdog may end it


class Message(msgspec.Struct, forbid_unknown_fields=True, tag_field="say"):
    """What a rank may send."""


class Hello(Message, tag="hello"):
    """The first message of a rank. handler: its descriptor for the memory into which its faulthandler writes."""

    rank: int
    handler: int | None


class PhaseBegins(Message, tag="begins"):
    """deadline: seconds that the phase may take."""

    phase: str
    step: int | None
    deadline: float | None


class PhaseEnds(Message, tag="ends"):
    """The phase ended without a failure."""

    phase: str


class PhaseFails(Message, tag="raises"):
    """An exception has left the phase. The rank may still catch it."""

    phase: str


class Failed(Message, tag="failed"):
    """What is about to end the rank: an error, one that may follow from another rank's, or SIGINT."""

    kind: Literal["exception", "echo", "told"]
    error: str
    trace: tuple[str, ...] = ()


class Exits(Message, tag="bye"):
    """The rank is about to exit on its own with this code."""

    code: int


class Flush(Message, tag="flush"):
    """Ask for an answer once the other hosts have been sent a beat."""


class Met(Message, tag="peers"):
    """All ranks have met. own: index of this host in nodes; key: of the heartbeats; folder: the run directory."""

    nodes: tuple[Node, ...]
    own: int
    key: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})+$")]
    folder: str

    def __post_init__(self) -> None:
        if not 0 <= self.own < len(self.nodes):
            raise ValueError("own is out of range")


_DECODER = msgspec.json.Decoder(Hello | PhaseBegins | PhaseEnds | PhaseFails | Failed | Exits | Flush | Met)


class MalformedError(ValueError):
    """A packet is not a valid message of a rank."""


def parse(packet: bytes) -> Message:
    """Return the message of a rank. Raise MalformedError."""
    try:
        return _DECODER.decode(packet)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedError(f"a malformed message ({error})") from error


def listen(name: str) -> tuple[socket.socket, Path]:
    """Return a listening socket, and its folder, which the caller removes. name: the same for all ranks that connect.

    The folder's name has a random end, so that another user cannot block it by making a folder of the same name first.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=BASE))  # 0700
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / FILE))
    listener.listen()
    return listener, folder


def connect(name: str) -> socket.socket | None:
    """Return a connection to the process of this user that listens under this name; None if there is none yet."""
    for folder in BASE.glob(f"{name}-*"):
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with suppress(OSError):
            if _is_own(folder):
                line.connect(str(folder / FILE))
                if peer_of(line)[1] == os.geteuid():
                    return line
        line.close()
    return None


def peer_of(line: socket.socket) -> tuple[int, int]:
    """Return the kernel's pid and uid of the other end; pid 0 if it is in a pid namespace that is not visible here."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


def remove(folder: Path) -> None:
    """Remove the folder of a socket; open connections stay."""
    with suppress(FileNotFoundError):
        (folder / FILE).unlink()
        folder.rmdir()


def remove_all(name: str) -> None:
    """Remove this user's folders of the sockets of that name, which nobody listens on any more."""
    for folder in BASE.glob(f"{name}-*"):
        with suppress(FileNotFoundError):
            if _is_own(folder):
                remove(folder)


def _is_own(folder: Path) -> bool:
    found = folder.lstat()
    return found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode)
