"""Parameters, optimizer states and gradients that wait in host memory between uses.

What moves is the storage under a tensor, never the tensor: FSDP2 keeps a flat view of each shard beside the DTensor, and
a weight sync keeps the DTensors themselves. A storage is emptied and filled again in place, as FSDP does with its
gathered parameters, so that every object and view stays valid; while it is empty nothing may read it. Why not torch's
CPUOffloadPolicy: see README.md.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached: of the part, as DTensor's own detach() takes ten times as long."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def storages_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages under this rank's parts, each once, in order.

    Without those that have no bytes, and on the CPU those that schedulers have mapped, which can be given no memory again.
    """
    found = {storage._cdata: storage for storage in (local(tensor).untyped_storage() for tensor in tensors)}
    return [each for each in found.values() if each.nbytes() and (each.is_cuda or not each.is_shared())]


class Offload:
    """Tensors that are in host memory except inside `on_device()`."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], wanted: bool) -> None:
        """Move the tensors to the host, where wanted.

        tensors: called each time they leave, so that states which an optimizer makes at its first step leave too.
        """
        self._tensors = tensors
        self._wanted = wanted
        self._uses = 0
        self._waiting: list[tuple[torch.UntypedStorage, Tensor]] = []
        """Storages without memory, and their bytes in host memory: uint8 [bytes], pinned where the storage is on a GPU."""
        self._leave()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Give the tensors their memory inside this context. Raise torch.OutOfMemoryError where there is no room.

        Contexts nest: tensors leave with the outermost, but not after an exception, which a second failure while they
        leave would hide.
        """
        for storage, host in self._waiting:
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host, non_blocking=True)
        _wait(self._waiting)
        self._waiting = []
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
        if self._uses == 0:
            self._leave()

    @torch.no_grad()
    def _leave(self) -> None:
        """Copy the storages to the host and give their memory back to the allocator."""
        if not self._wanted:
            return
        pairs = []
        for storage in storages_of(self._tensors()):
            pinned = storage.device.type == "cuda"
            pairs.append((storage, torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)))
        _wait(pairs)
        for storage, host in pairs:
            host.copy_(_bytes_of(storage), non_blocking=host.is_pinned())
        _wait(pairs)
        for storage, _ in pairs:
            storage.resize_(0)
        self._waiting = pairs


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return the storage as uint8 [bytes], not a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(pairs: list[tuple[torch.UntypedStorage, Tensor]]) -> None:
    """Wait for all of the GPU's streams: FSDP reads shards on streams of its own."""
    if any(storage.device.type == "cuda" for storage, _ in pairs):
        torch.cuda.synchronize()


class Gradients:
    """Gradients of a minibatch, on the device or added up in host memory.

    Offloaded, the device has those of one microbatch, and the sum of one parameter. The sum itself is computed on the
    device, in the gradients' dtype, as autograd would: results are the same bits.
    """

    def __init__(self, parameters: Iterable[Tensor], offloaded: bool) -> None:
        self.parameters = list(parameters)
        self._offloaded = offloaded
        self._sums: dict[Tensor, Tensor] = {}
        """Parameter -> sum of this rank's gradients so far, on the host."""

    @torch.no_grad()
    def add(self) -> None:
        """Take in what a backward left; on the device autograd has added it up already."""
        for parameter in self.parameters if self._offloaded else ():
            if parameter.grad is None:
                continue
            own = local(parameter.grad)
            if parameter in self._sums:
                self._sums[parameter].copy_(self._sums[parameter].to(own.device).add_(own))
            else:
                host = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.device.type == "cuda")
                self._sums[parameter] = host.copy_(own)
            parameter.grad = None

    def pieces(self) -> Iterator[list[Tensor]]:
        """Yield this rank's gradients, summed over the microbatches, piece by piece; a piece is in its parameters' grad."""
        if not self._offloaded:
            yield [local(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        for parameter in self.parameters:
            if parameter in self._sums:
                parameter.grad = torch.empty_like(parameter)
                gradient = local(parameter.grad)
                yield [gradient.copy_(self._sums[parameter])]
                parameter.grad = None

    def clear(self) -> None:
        """Forget all gradients."""
        self._sums = {}
        for parameter in self.parameters:
            parameter.grad = None
