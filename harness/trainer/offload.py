"""Parameters, optimizer states and gradients that wait in host memory between uses.

What moves is the storage under a tensor, never the tensor: FSDP2 keeps a flat view of each shard beside the DTensor, and
a weight sync keeps the DTensors themselves. A storage is emptied in place, as FSDP empties its gathered parameters, and
filled again in place, so that every object stays the same and every view valid. Outside `on_device()` the tensors keep
their shapes and have no memory: nothing may read them.

torch's CPUOffloadPolicy is another thing: with it parameters, gradients and moments are on the host always, every layer
is copied for each forward and backward, and AdamW runs on the CPU. Here all arithmetic stays on the device, with the
same bits, and its memory is free while the engine generates.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.config import schema

Waiting = list[tuple[torch.UntypedStorage, Tensor]]
"""Storages without memory, and their bytes in host memory: uint8 [bytes], pinned where the storage is on a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloaded:
    """What of one model waits in host memory while it is not used."""

    parameters: bool = False
    gradients: bool = False
    optimizer: bool = False

    @classmethod
    def of(cls, memory: schema.Memory, role: Any) -> Self:
        """Return the config's choice for a role: actor, critic or reference."""
        return cls(
            parameters=role in memory.offload_parameters,
            gradients=role in memory.offload_gradients,
            optimizer=role in memory.offload_optimizer,
        )


NOTHING = Offloaded()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def storages_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages under this rank's parts, each once, in order; without those that have no bytes."""
    found = {storage._cdata: storage for storage in (local(tensor).untyped_storage() for tensor in tensors)}
    return [storage for storage in found.values() if storage.nbytes()]


def to_host(storages: Collection[torch.UntypedStorage]) -> Waiting:
    """Copy the storages to host memory and give their own back to the allocator.

    Waits for the GPU's streams before and after: FSDP reads shards on streams of its own.
    """
    _wait(storages)
    waiting: Waiting = []
    for storage in storages:
        pinned = storage.device.type == "cuda"
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
        waiting.append((storage, host.copy_(_bytes_of(storage), non_blocking=pinned)))
    _wait(storages)
    for storage in storages:
        storage.resize_(0)
    return waiting


def to_device(waiting: Waiting) -> None:
    """Give the storages memory again, and their bytes. Raise torch.OutOfMemoryError where there is no room."""
    for storage, host in waiting:
        storage.resize_(host.numel())
        _bytes_of(storage).copy_(host, non_blocking=True)
    _wait([storage for storage, _ in waiting])


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return the storage as uint8 [bytes], not a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(storages: Iterable[torch.UntypedStorage]) -> None:
    if any(storage.device.type == "cuda" for storage in storages):
        torch.cuda.synchronize()


class Offload:
    """Tensors that are in host memory except inside `on_device()`."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], wanted: bool) -> None:
        """Move the tensors to the host, where wanted.

        tensors: called each time they leave, so that states which an optimizer makes at its first step leave too.
        """
        self._tensors = tensors
        self._wanted = wanted
        self._uses = 0
        self._waiting: Waiting = []
        self._release()

    @property
    def host_bytes(self) -> int:
        """Bytes that wait in host memory now."""
        return sum(host.numel() for _, host in self._waiting)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Give the tensors their memory inside this context.

        Contexts nest: tensors leave with the outermost, but not after an exception, which a second failure while they
        leave would hide.
        """
        if self._uses == 0:
            to_device(self._waiting)
            self._waiting = []
        self._uses += 1
        failed = True
        try:
            yield
            failed = False
        finally:
            self._uses -= 1
            if self._uses == 0 and not failed:
                self._release()

    @torch.no_grad()
    def _release(self) -> None:
        if self._wanted:
            self._waiting = to_host(storages_of(self._tensors()))


class Gradients:
    """Gradients of a minibatch where autograd leaves them, on the device."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)

    def add(self) -> None:
        """Take in what a backward left. Autograd has added it up already."""

    def pieces(self, last: bool = False) -> Iterator[list[Tensor]]:
        """Yield parameters whose .grad is the sum over the microbatches, piece by piece; after `last` it is gone."""
        yield [parameter for parameter in self.parameters if parameter.grad is not None]
        if last:
            self.clear()

    def clear(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters:
            parameter.grad = None


class HostGradients(Gradients):
    """Gradients added up in host memory: the device has those of one microbatch, and the sum of one parameter.

    The sum itself is computed on the device, in the gradients' dtype, as autograd would: results are the same bits.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self._sums: dict[Tensor, Tensor] = {}
        """Parameter -> sum of this rank's gradients so far, on the host."""

    @torch.no_grad()
    def add(self) -> None:
        """Add what the backward left to the sums, and take it off the device."""
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            own = local(parameter.grad)
            if parameter in self._sums:
                self._sums[parameter].copy_(self._sums[parameter].to(own.device).add_(own))
            else:
                host = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.device.type == "cuda")
                self._sums[parameter] = host.copy_(own)
            parameter.grad = None

    def pieces(self, last: bool = False) -> Iterator[list[Tensor]]:
        """Yield as Gradients does; only one parameter's sum is on the device at a time."""
        for parameter, total in self._sums.items():
            parameter.grad = torch.empty_like(parameter)
            local(parameter.grad).copy_(total)
            yield [parameter]
            parameter.grad = None
        if last:
            self.clear()

    def clear(self) -> None:
        """Forget all gradients, those in host memory too."""
        super().clear()
        self._sums = {}
