"""Two buffers between a trainer rank and its scheduler, and the connection on which they take turns.

The trainer rank makes the buffers and fills them; the scheduler opens them once and reads. torch shares them: on a GPU
through an IPC handle, with events that order the two processes' streams; on the CPU as shared memory.
"""

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing  # teaches multiprocessing's connections to share tensors

from harness.rollout.engine_errors import PeerGone

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
    """Bytes from the first of the slot to the first element of the tensor."""
    group: int
    """Entries of one group may fuse in the engine, and are loaded in one call."""

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def holds(self, offset: int) -> bool:
        """Return whether an element begins at that byte of the slot, for strides that nest."""
        left, inside = divmod(offset - self.offset, self.dtype.itemsize)
        for stride, size in sorted(zip(self.stride, self.shape, strict=True), reverse=True):
            left -= min(left // stride, size - 1) * stride if stride else 0
        return left == 0 and inside == 0

    def view(self, slot: torch.Tensor) -> torch.Tensor:
        """Return the tensor inside a slot (uint8, 1-D, first byte of its storage first), without a copy."""
        return typed(slot, self.dtype).as_strided(self.shape, self.stride, self.offset // self.dtype.itemsize)


Layout = tuple[tuple[SlotEntry, ...], ...]
"""The entries of each bucket; bucket b is always in slot b % SLOTS."""


@dataclass(frozen=True, slots=True)
class Region:
    """What of a slot one copy of the engine's loader reads, counted in elements of dtype."""

    name: str
    """The checkpoint tensor that the elements are of."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    target_dtype: torch.dtype
    """As the engine holds the elements."""

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """(stride, size) of the axes along which different elements lie, by stride."""
        axes = zip(self.stride, self.shape, strict=True)
        return tuple(sorted((stride, size) for stride, size in axes if size != 1 and (stride or not size)))

    def view(self, slot: torch.Tensor) -> torch.Tensor:
        """Return the elements inside a slot, without a copy."""
        return typed(slot, self.dtype).as_strided(self.shape, self.stride, self.offset)


def typed(slot: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a slot (uint8, 1-D) as elements of dtype, as many as are whole."""
    return slot[: slot.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def slot_bytes(payload: int) -> int:
    """Return the bytes of a slot for buckets up to `payload` bytes, with room for the stamp."""
    return -(-payload // ALIGNMENT) * ALIGNMENT + ALIGNMENT


def stamp(slot: torch.Tensor) -> torch.Tensor:
    """Return the sequence number of the bucket in a slot, int64 [1] at its end.

    The writer sets it first: a reader that still finds the number of its own bucket afterwards was not overtaken.
    """
    return slot[-STAMP_BYTES:].view(torch.int64)


@dataclass(slots=True)
class SlotConnection:
    """One end of the connection, with the slots and, on CUDA, the events."""

    connection: Connection
    slots: list[torch.Tensor]
    filled: list[torch.cuda.Event]
    """Recorded by the writer when a slot is whole; empty on the CPU, as `read`."""
    read: list[torch.cuda.Event]
    """Recorded by the reader when it is done with a slot."""

    def send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerGone("the other end of the weight stream is gone") from error

    def receive(self, give_up: Callable[[], bool] = lambda: False) -> Any:
        """Return the next message. Raise PeerGone when there is none and give_up() is true."""
        try:
            while not self.connection.poll(POLL_SECONDS):
                if give_up() and not self.connection.poll(0):
                    raise PeerGone("the engine's call ended before its scheduler had answered")
            return self.connection.recv()
        except PeerGone:
            raise
        except (EOFError, OSError) as error:  # OSError: it died in mid-message
            raise PeerGone("the other end of the weight stream is gone") from error

    def close(self) -> None:
        self.connection.close()
        for each in (self.slots, self.filled, self.read):
            each.clear()


class StreamListener:
    """Where a trainer rank waits for its scheduler: a socket in a folder that both know, on one host."""

    def __init__(self, folder: Path, engine_rank: int) -> None:
        """folder: for this user alone, with the same path on every host of the engine."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_private(folder)
        self.folder = folder
        self.listener = Listener(str(folder / f"{engine_rank}.socket"), family="AF_UNIX")

    def offer(self, nbytes: int, device: torch.device, layout: Layout, give_up: Callable[[], bool]) -> SlotConnection:
        """Wait for the scheduler, make slots of nbytes each, and hand them over with the layout.

        Raise PeerGone when give_up() is true before the scheduler came.
        """
        # multiprocessing's Listener has no timeout of its own.
        self.listener._listener._socket.settimeout(POLL_SECONDS)  # type: ignore[attr-defined]
        connection = None
        while connection is None:
            try:
                connection = self.listener.accept()
            except TimeoutError:
                if give_up():
                    raise PeerGone("the engine's call ended before its scheduler had come") from None
        slots = [torch.full((nbytes,), 255, dtype=torch.uint8, device=device) for _ in range(SLOTS)]  # no stamp is -1
        link = SlotConnection(connection, slots, _events(device), [])
        link.send((layout, slots, [event.ipc_handle() for event in link.filled]))
        link.read = [torch.cuda.Event.from_ipc_handle(device, handle) for handle in link.receive(give_up)]
        return link

    def close(self) -> None:
        self.listener.close()
        with suppress(OSError):  # another rank's socket may still be there: the last one removes the folder
            self.folder.rmdir()


def connect_slots(folder: Path, engine_rank: int, device: torch.device) -> tuple[SlotConnection, Layout]:
    """Connect a scheduler to the listener of its trainer rank and open the slots."""
    require_private(folder)
    connection = Client(str(folder / f"{engine_rank}.socket"), family="AF_UNIX")
    try:
        layout, slots, handles = connection.recv()
    except (EOFError, OSError) as error:
        raise PeerGone("the trainer rank was gone before it had handed over its slots") from error
    filled = [torch.cuda.Event.from_ipc_handle(device, handle) for handle in handles]
    link = SlotConnection(connection, slots, filled, _events(device))
    link.send([event.ipc_handle() for event in link.read])
    return link, layout


def require_private(folder: Path) -> None:
    """Raise PermissionError unless the folder is private to this user: what its sockets deliver is unpickled."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must be a folder of user {os.getuid()} with mode 0700: another user may have made it"
        )


def _events(device: torch.device) -> list[torch.cuda.Event]:
    if device.type != "cuda":
        return []
    events = [torch.cuda.Event(interprocess=True) for _ in range(SLOTS)]
    with torch.cuda.device(device):
        for event in events:
            event.record()  # a handle needs an event that exists, and a wait for a fresh one must return at once
        torch.cuda.synchronize(device)
    return events


class SegmentTimer:
    """Measures seconds by name: on CUDA of the GPU's own time, else of the wall."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.spans: list[tuple[str, Any, Any]] = []

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time in here to `name`, unless it ends in an exception."""
        started = self._now()
        yield
        self.spans.append((name, started, self._now()))

    def read(self) -> dict[str, float]:
        if self.on_gpu:
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for name, start, end in self.spans:
            spent = start.elapsed_time(end) / 1e3 if self.on_gpu else end - start
            seconds[name] = seconds.get(name, 0.0) + spent
        return seconds
