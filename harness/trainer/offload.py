"""Parameters, optimizer states and gradients that wait in host memory between uses.

What moves is the storage under a tensor, never the tensor: FSDP2 keeps a flat view of each shard beside the DTensor, and
a weight sync keeps the DTensors themselves. A storage is emptied in place, as FSDP empties its gathered parameters, and
filled again in place, so that every object stays the same and every view valid. Outside `on_device()` the tensors keep
their shapes and have no memory: nothing may read them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.config import schema


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloaded:
    """What of one model waits in host memory while it is not used."""

    parameters: bool = False
    gradients: bool = False
    optimizer: bool = False

    @classmethod
    def of(cls, memory: schema.Memory, role: Any) -> Self:
        """role: actor, critic or reference."""
        return cls(
            parameters=role in memory.offload_parameters,
            gradients=role in memory.offload_gradients,
            optimizer=role in memory.offload_optimizer,
        )


NOTHING = Offloaded()


@dataclass(frozen=True, slots=True)
class Waiting:
    """One storage whose bytes are in host memory (pinned where the storage is on a GPU), and which has none itself."""

    storage: torch.UntypedStorage
    host: Tensor
    """uint8 [bytes]."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, detached."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def storages_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages under this rank's parts, each once, in order; without those that have no bytes."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = local(tensor).untyped_storage()
        if storage.nbytes():
            found.setdefault(storage._cdata, storage)
    return list(found.values())


def to_host(storages: Collection[torch.UntypedStorage]) -> list[Waiting]:
    """Copy the storages to host memory and give their own back to the allocator. Waits for the GPU's streams, before and
    after: FSDP reads shards on streams of its own."""
    _wait(storages)
    waiting = []
    for storage in storages:
        pinned = storage.device.type == "cuda"
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
        host.copy_(_bytes_of(storage), non_blocking=pinned)
        waiting.append(Waiting(storage, host))
    _wait(storages)
    for storage in storages:
        storage.resize_(0)
    return waiting


def to_device(waiting: Collection[Waiting]) -> None:
    """Give the storages memory again, and their bytes. Raises torch.OutOfMemoryError where there is no room."""
    for each in waiting:
        each.storage.resize_(each.host.numel())
        _bytes_of(each.storage).copy_(each.host, non_blocking=True)
    _wait([each.storage for each in waiting])


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The storage as uint8 [bytes], not a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(storages: Collection[torch.UntypedStorage]) -> None:
    if any(storage.device.type == "cuda" for storage in storages):
        torch.cuda.synchronize()


class Offload:
    """Tensors that are in host memory except inside `on_device()`."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], wanted: bool) -> None:
        """tensors: asked anew each time they leave, so that states which an optimizer makes at its first step leave too.
        Without `wanted` nothing ever moves; with it they leave now."""
        self._tensors = tensors
        self._wanted = wanted
        self._uses = 0
        self._waiting: list[Waiting] = []
        self._leave()

    @property
    def host_bytes(self) -> int:
        """Bytes that wait in host memory now."""
        return sum(each.host.numel() for each in self._waiting)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """The tensors have their memory in here. Contexts nest: they leave with the outermost, but not after an exception,
        which a second failure while they leave would hide."""
        if self._uses == 0:
            to_device(self._waiting)
            self._waiting = []
        self._uses += 1
        try:
            yield
        except BaseException:
            self._uses -= 1
            raise
        self._uses -= 1
        if self._uses == 0:
            self._leave()

    @torch.no_grad()
    def _leave(self) -> None:
        if self._wanted:
            self._waiting = to_host(storages_of(self._tensors()))


@dataclass(slots=True)
class _Piece:
    """Parameters whose gradients share one storage: FSDP reduces those of a layer into one."""

    gradients: dict[Tensor, Tensor]
    """Parameter -> its gradient so far."""
    waiting: list[Waiting]

    def fetch(self) -> None:
        to_device(self.waiting)
        self.waiting = []

    def put_away(self) -> None:
        self.waiting = to_host(storages_of(self.gradients.values()))


class Gradients:
    """Gradients of a minibatch where autograd leaves them, on the device."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)

    def add(self) -> None:
        """After each backward: take in what it left. Autograd has added it up already."""

    def pieces(self, last: bool = False) -> Iterator[list[Tensor]]:
        """Parameters whose .grad is the sum over the microbatches, piece by piece; all at once here. After the last time
        the sums are gone."""
        yield [parameter for parameter in self.parameters if parameter.grad is not None]
        if last:
            self.clear()

    def clear(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters:
            parameter.grad = None


class HostGradients(Gradients):
    """Gradients added up in host memory: the device holds those of one microbatch, and one piece of the sum.

    The sum itself is computed on the device, in the gradients' dtype, as autograd would: results are the same bits.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self._pieces: list[_Piece] = []

    @torch.no_grad()
    def add(self) -> None:
        """Add what the backward left to the sums, and take it off the device."""
        for piece in self._pieces:
            piece.fetch()
            for parameter, total in piece.gradients.items():
                if parameter.grad is not None:
                    local(total).add_(local(parameter.grad))
                    parameter.grad = None
            piece.put_away()
        fresh: dict[int, _Piece] = {}
        for parameter in self.parameters:
            if parameter.grad is not None:
                key = local(parameter.grad).untyped_storage()._cdata
                fresh.setdefault(key, _Piece({}, [])).gradients[parameter] = parameter.grad
                parameter.grad = None
        for piece in fresh.values():
            piece.put_away()
        self._pieces.extend(fresh.values())

    def pieces(self, last: bool = False) -> Iterator[list[Tensor]]:
        """As in Gradients; only one piece has its memory on the device at a time."""
        for piece in self._pieces:
            piece.fetch()
            for parameter, total in piece.gradients.items():
                parameter.grad = total
            yield list(piece.gradients)
            for parameter in piece.gradients:
                parameter.grad = None
            if last:
                piece.gradients.clear()
            else:
                piece.put_away()
        if last:
            self.clear()

    def clear(self) -> None:
        """Forget all gradients, those in host memory too."""
        super().clear()
        self._pieces = []
