"""The socket on which a watchdog hears the ranks of its host: in a folder that no other user can enter, and with the
credentials of both ends checked by the kernel's word."""

import os
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

FILE = "ranks"
BACKLOG = 64


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, as the kernel says."""

    pid: int
    """0 where it is in a pid namespace that cannot be seen from here."""
    uid: int


def listen(name: str) -> tuple[socket.socket, Path]:
    """Return a socket that listens, and its folder, which the caller removes. name: the same for all ranks that connect.

    The folder's own name ends at random: what another user made under a name that can be guessed is not in the way.
    Raises OSError where no folder for temporary files can hold it.
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
    raise OSError(f"no folder takes the watchdog's socket, which must be in TMPDIR or /dev/shm: {'; '.join(problems)}")


def connect(name: str) -> socket.socket | None:
    """Return a line to the process of this user that listens under this name; None where there is none yet."""
    for base in _bases():
        with suppress(OSError), os.scandir(base) as entries:
            folders = [Path(entry.path) for entry in entries if entry.name.startswith(f"{name}-")]
            for folder in folders:
                if (line := _connected(folder)) is not None:
                    return line
    return None


def peer_of(line: socket.socket) -> Peer:
    """Return the process that connected; of a line that we made, the one that listened."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return Peer(pid, uid)


def is_ours(line: socket.socket) -> bool:
    """Whether the other end belongs to the user that we are."""
    return peer_of(line).uid == os.geteuid()


def remove(folder: Path) -> None:
    """Remove the folder; lines that are open stay so."""
    with suppress(FileNotFoundError):
        (folder / FILE).unlink()
    with suppress(FileNotFoundError):
        folder.rmdir()


def _bases() -> list[Path]:
    bases = [Path("/dev/shm")]
    with suppress(FileNotFoundError):  # no folder for temporary files can be written
        bases.insert(0, Path(tempfile.gettempdir()))
    return bases


@contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """A path of the folder that fits into the 108 bytes of a socket's address, of this very folder and no link to one.

    Raises OSError where it is another user's, or open to others.
    """
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(f"{folder} is open to other users")
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _connected(folder: Path) -> socket.socket | None:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with suppress(OSError), _short_path(folder) as path:
        line.connect(f"{path}/{FILE}")
        if is_ours(line):
            return line
    line.close()
    return None
