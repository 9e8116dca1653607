"""Parameters and optimizer states that wait in host memory between uses.

Only the storage under a tensor moves, never the tensor: FSDP2 keeps a flat view of each shard next to the DTensor, and
a weight sync keeps the DTensors themselves. A storage is emptied and filled again in place, as FSDP does with its
gathered parameters, so that every object and view stays valid. Nothing may read a tensor while its storage is empty.
README.md says why this is not torch's CPUOffloadPolicy.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached.

    Detaching the part takes a tenth of the time of DTensor.detach().
    """
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def storages_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages under this rank's parts of the tensors that can be offloaded, each once, in order.

    Empty storages are left out. So are shared ones on the CPU: an engine's scheduler has mapped them, and torch cannot
    resize them.
    """
    found = {storage._cdata: storage for storage in (local(tensor).untyped_storage() for tensor in tensors)}
    return [each for each in found.values() if each.nbytes() and (each.is_cuda or not each.is_shared())]


class Offload:
    """Tensors that are in host memory, except inside `on_device()`."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], wanted: bool) -> None:
        """Move the tensors to the host if `wanted`; otherwise they stay on the device.

        tensors: called each time they leave the device, since an optimizer makes its states at its first step.
        """
        self._tensors = tensors
        self._wanted = wanted
        self._uses = 0
        self._waiting: list[tuple[torch.UntypedStorage, Tensor]] = []
        """Emptied storages and their bytes in host memory: uint8 [bytes], pinned if the storage is on a GPU."""
        self._leave()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the tensors on the device inside this context. Raise torch.OutOfMemoryError if they do not fit.

        Contexts nest: the tensors leave at the end of the outermost one. They stay after an exception, since a second
        failure while they leave would hide it.
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
        """Copy the storages to the host and return their memory to the allocator."""
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
    """Return a view of the storage as uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(pairs: list[tuple[torch.UntypedStorage, Tensor]]) -> None:
    """Wait for all streams of the GPU: FSDP reads shards on other streams than the current one."""
    if any(storage.device.type == "cuda" for storage, _ in pairs):
        torch.cuda.synchronize()
