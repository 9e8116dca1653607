"""The channel from the ranks of a host to their watchdog: a private Unix socket, and the messages that may come over it.

The socket is in a folder that no other user can enter, and the kernel's credentials are checked at both ends. A message is
a JSON object in one line; it is checked field by field, and a line that is not one of a rank's messages is rejected.
"""

import os
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness.tools.watchdog.failures import Node

FILE = "ranks"
BACKLOG = 64
LONGEST_LINE = 4 << 20  # bytes: room for the locations of thousands of hosts


class Message(msgspec.Struct, forbid_unknown_fields=True, tag_field="say"):
    """What a rank may send."""


class Hello(Message, tag="hello"):
    """The first message of a rank; handler: its descriptor of the memory into which its faulthandler writes."""

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


class Injected(Message, tag="injected"):
    """The fault that is about to happen because it was asked for."""

    fault: str


class Interrupted(Message, tag="interrupted"):
    """The name of the signal that is about to end the rank."""

    signal: str


class Failed(Message, tag="failed"):
    """The error that is about to end the rank; echo: whether it may follow from another rank's."""

    error: str
    echo: bool
    trace: tuple[str, ...]


class Exits(Message, tag="bye"):
    """The rank is about to exit on its own with this code."""

    code: int


class Flush(Message, tag="flush"):
    """Ask for an answer once the other hosts have been sent a beat."""


class Met(Message, tag="peers"):
    """All ranks have met. own: index of this host in nodes; key: of the heartbeats; folder: the run directory."""

    nodes: tuple[Node, ...]
    own: int
    key: str
    folder: str


_DECODER = msgspec.json.Decoder(
    Hello | PhaseBegins | PhaseEnds | Injected | Interrupted | Failed | Exits | Flush | Met,
)


class MalformedError(ValueError):
    """A line is not a valid message of a rank."""


def listen(name: str) -> tuple[socket.socket, Path]:
    """Return a listening socket, and its folder, which the caller removes. name: the same for all ranks that connect.

    The name of the folder ends at random, so that nothing that another user made under a predictable name is in the way.
    Raise OSError if no folder for temporary files can hold it.
    """
    problems = []
    for base in _bases():
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=base))  # 0700
        except OSError as error:
            problems.append(str(error))
            continue
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short_path(folder) as path:
                listener.bind(f"{path}/{FILE}")
            listener.listen(BACKLOG)
            return listener, folder
        except OSError as error:
            problems.append(f"{folder}: {error}")
            listener.close()
            remove(folder)
    raise OSError(f"the watchdog's socket must be in TMPDIR or /dev/shm, got: {'; '.join(problems)}")


def connect(name: str) -> socket.socket | None:
    """Return a connection to the process of this user that listens under this name; None if there is none yet."""
    for base in _bases():
        with suppress(OSError), os.scandir(base) as entries:
            for folder in [Path(entry.path) for entry in entries if entry.name.startswith(f"{name}-")]:
                line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                with suppress(OSError), _short_path(folder) as path:
                    line.connect(f"{path}/{FILE}")
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
    with suppress(FileNotFoundError):
        folder.rmdir()


def _bases() -> list[Path]:
    bases = [Path("/dev/shm")]
    with suppress(FileNotFoundError):  # no writable folder for temporary files
        bases.insert(0, Path(tempfile.gettempdir()))
    return bases


@contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """Yield a path of this very folder, not of a link, that fits into the 108 bytes of a socket's address.

    Raise OSError if it is another user's, or open to others.
    """
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(f"{folder} is open to other users")
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


@dataclass(slots=True)
class LineBuffer:
    """Split incoming data into lines of bounded length."""

    _data: bytes = b""

    def add(self, data: bytes) -> list[bytes]:
        """Return the complete lines; an empty one, which is no message, in the place of one that is too long."""
        *lines, self._data = (self._data + data).split(b"\n")
        if len(self._data) > LONGEST_LINE:
            lines, self._data = [*lines, b""], b""
        return [line if len(line) <= LONGEST_LINE else b"" for line in lines]


def parse(line: bytes) -> Message:
    """Return the message of a rank. Raise MalformedError."""
    try:
        message = _DECODER.decode(line)
        if isinstance(message, Met):
            bytes.fromhex(message.key)
            if not 0 <= message.own < len(message.nodes):
                raise ValueError("own is out of range")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedError(f"a malformed message ({error})") from error
    return message
