"""Two buffers between a trainer rank and its scheduler, and the connection on which they take turns.

The trainer rank makes the buffers and fills them; the scheduler opens them once and reads. On a GPU they are CUDA
memory, opened through an IPC handle, and events order the two processes' streams; on the CPU they are a mapped file.
"""

import mmap
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Self

import torch

from harness.rollout.errors import PeerGone

SLOTS = 2
ALIGNMENT = 256
STAMP_BYTES = 8
POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotEntry:
    """One checkpoint tensor in a slot: a strided view."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    offset: int
    """Bytes from the slot's first to the tensor's first element."""
    group: int
    """Entries of one group may fuse in the engine, and are loaded in one call."""

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, contiguous."""
        return self.numel * self.dtype.itemsize

    def holds(self, offset: int) -> bool:
        """Whether one of its elements begins at that byte of the slot, for strides that nest."""
        left, inside = divmod(offset - self.offset, self.dtype.itemsize)
        for stride, size in sorted(zip(self.stride, self.shape, strict=True), reverse=True):
            left -= min(left // stride, size - 1) * stride if stride else 0
        return left == 0 and inside == 0

    def view(self, slot: torch.Tensor) -> torch.Tensor:
        """The tensor inside a slot (uint8, 1-D, its storage's first byte first)."""
        return typed(slot, self.dtype).as_strided(self.shape, self.stride, self.offset // self.dtype.itemsize)


Layout = tuple[tuple[SlotEntry, ...], ...]
"""The entries of each bucket; bucket b is always in slot b % SLOTS."""


def typed(slot: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A slot (uint8, 1-D) as elements of dtype, as many as are whole; not a copy."""
    return slot[: slot.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def slot_bytes(payload: int) -> int:
    """Bytes of a slot for buckets up to `payload` bytes: rounded up, and room for the stamp."""
    return -(-payload // ALIGNMENT) * ALIGNMENT + ALIGNMENT


def stamp(slot: torch.Tensor) -> torch.Tensor:
    """int64 [1] at the slot's end: the sequence number of the bucket in it. Its writer sets it first, so a reader that
    still finds its own bucket's number when it is done has not been overwritten meanwhile."""
    return slot[-STAMP_BYTES:].view(torch.int64)


@dataclass(slots=True)
class Link:
    """One end of the connection, with the slots and, on CUDA, the events."""

    connection: Connection
    slots: list[torch.Tensor]
    filled: list[torch.cuda.Event]
    """Recorded by the writer when a slot is whole; empty on the CPU, as `read`."""
    read: list[torch.cuda.Event]
    """Recorded by the reader when it is done with a slot."""

    def send(self, message: object) -> None:
        """Raises PeerGone when nobody listens any more."""
        try:
            self.connection.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerGone("the other end of the weight stream is gone") from error

    def receive(self, give_up: Callable[[], bool] = lambda: False) -> Any:
        """The next message. Raises PeerGone when there is none and give_up() says that none will come."""
        try:
            while not self.connection.poll(POLL_SECONDS):
                if give_up() and not self.connection.poll(0):
                    raise PeerGone("the engine's call ended before its scheduler had answered")
            return self.connection.recv()
        except (EOFError, OSError) as error:  # OSError: it died in mid-message
            if isinstance(error, PeerGone):
                raise
            raise PeerGone("the other end of the weight stream is gone") from error

    def close(self) -> None:
        """Close the connection and let the slots go."""
        self.connection.close()
        self.slots.clear()
        self.filled.clear()
        self.read.clear()


@dataclass(slots=True)
class StreamListener:
    """Where a trainer rank waits for its scheduler: a socket in a folder that both know, on one host."""

    listener: Listener
    path: Path

    @classmethod
    def open(cls, folder: Path, engine_rank: int) -> Self:
        """folder: the same path on every host of the engine, for this user alone."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_private(folder)
        path = folder / f"{engine_rank}.socket"
        return cls(Listener(str(path), family="AF_UNIX"), path)

    def offer(self, nbytes: int, device: torch.device, layout: Layout, give_up: Callable[[], bool]) -> Link:
        """Wait for the scheduler, make the slots and hand them over with the layout.

        nbytes: of one slot. Raises PeerGone when give_up() says that no scheduler will come.
        """
        connection = self._accept(give_up)
        if device.type == "cuda":
            link = Link(connection, [], _events(device), [])
            link.slots = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
            for slot in link.slots:
                stamp(slot).fill_(-1)
            torch.cuda.synchronize(device)
            link.send((layout, link.slots, [event.ipc_handle() for event in link.filled]))
            link.read = [torch.cuda.Event.from_ipc_handle(device, handle) for handle in link.receive(give_up)]
        else:
            files = [self.path.with_suffix(f".slot{index}") for index in range(SLOTS)]
            link = Link(connection, [map_file(file, nbytes) for file in files], [], [])
            try:
                link.send((layout, [str(file) for file in files], nbytes))
                link.receive(give_up)
            finally:
                for file in files:  # both ends hold it open, or nobody will
                    file.unlink()
        return link

    def close(self) -> None:
        """Close the socket and remove it."""
        self.listener.close()
        with suppress(OSError):  # another rank's files may still be there: the last one removes the folder
            self.path.parent.rmdir()

    def _accept(self, give_up: Callable[[], bool]) -> Connection:
        # multiprocessing's Listener has no timeout of its own.
        waiting = self.listener._listener._socket  # type: ignore[attr-defined]
        waiting.settimeout(POLL_SECONDS)
        while True:
            try:
                connection = self.listener.accept()
            except TimeoutError:
                if give_up():
                    raise PeerGone("the engine's call ended before its scheduler had come") from None
            else:
                return connection


def require_private(folder: Path) -> None:
    """Raise PermissionError unless the folder is this user's and closed to all others: what comes out of its sockets is unpickled."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must be a folder of user {os.getuid()} with mode 0700: another user may have made it"
        )


def take(folder: Path, engine_rank: int, device: torch.device) -> tuple[Link, Layout]:
    """The scheduler's end: connect to the trainer rank's door and open its slots."""
    require_private(folder)
    connection = Client(str(folder / f"{engine_rank}.socket"), family="AF_UNIX")
    try:
        layout, slots, extra = connection.recv()
    except (EOFError, OSError) as error:
        raise PeerGone("the trainer rank was gone before it had handed over its slots") from error
    if device.type == "cuda":
        filled = [torch.cuda.Event.from_ipc_handle(device, handle) for handle in extra]
        read = _events(device)
        connection.send([event.ipc_handle() for event in read])
        return Link(connection, slots, filled, read), layout
    mapped = [map_file(Path(path), extra) for path in slots]
    connection.send("opened")
    return Link(connection, mapped, [], []), layout


def map_file(path: Path, nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] over a file that several processes map; made when it is not there."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, nbytes)
        shared = mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)
    return torch.frombuffer(shared, dtype=torch.uint8)


def _events(device: torch.device) -> list[torch.cuda.Event]:
    events = [torch.cuda.Event(interprocess=True) for _ in range(SLOTS)]
    with torch.cuda.device(device):
        for event in events:
            event.record()  # a handle needs an event that exists, and a wait for a fresh one must return at once
    return events
