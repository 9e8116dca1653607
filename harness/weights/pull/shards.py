"""What each trainer rank holds of the live tensors, and where another process of its host finds it."""

import mmap
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from harness.trainer.offload import local
from harness.weights.gather import Chunks
from harness.weights.pull.gpu_memory import close_allocation, export_allocation, open_allocation
from harness.weights.pull.regions import Cut, cut_by_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlace:
    """Where a rank's part of one live tensor begins."""

    memory: int
    """Which of the rank's memories."""
    offset: int
    """Bytes from its beginning."""
    address: int
    """In the rank's own process: another one means that the shard has moved."""
    dtype: torch.dtype
    """As it is held, which may be wider than it is sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShards:
    """All parts that one trainer rank holds."""

    rank: int
    host: str
    gpu: str | None
    """Of its host, as CUDA_VISIBLE_DEVICES names it; None on the CPU."""
    memories: tuple[bytes | str, ...]
    """Handles of GPU allocations; paths of the CPU's shared memory."""
    sizes: tuple[int, ...]
    """Bytes of each memory."""
    places: dict[str, ShardPlace]
    """By live name, without those of which the rank holds no element."""


def cuts_of(live: Mapping[str, torch.Tensor], rank: int) -> dict[str, tuple[Cut, ...]]:
    """Return who holds which elements of each live tensor: FSDP2's rows, or this rank all of what is not sharded."""
    return {name: _cuts(tensor, rank) for name, tensor in live.items()}


def _cuts(tensor: torch.Tensor, rank: int) -> tuple[Cut, ...]:
    if not isinstance(tensor, DTensor):
        return (Cut(rank, 0, tensor.numel()),)
    chunks = Chunks.of(tensor, tensor.dtype)
    world = tensor.device_mesh.mesh.flatten().tolist()
    rows = tensor.numel() // max(chunks.row_elements, 1)
    found = cut_by_rows(rows, chunks.row_elements, chunks.ranks)
    return tuple(Cut(world[cut.owner], cut.start, cut.stop) for cut in found)


def export_shards(live: Mapping[str, torch.Tensor], rank: int, host: str, gpu: str | None) -> RankShards:
    """Return this rank's parts. CPU tensors are moved into shared memory, in place, where they are not there yet.

    Raise MemoryError where that has no room for them, CudaCallFailed where an allocation cannot be exported.
    """
    parts = {name: local(tensor) for name, tensor in live.items()}
    _check_room(parts.values())
    memories: dict[int, tuple[bytes | str, int]] = {}
    places: dict[str, ShardPlace] = {}
    for name, tensor in parts.items():
        if not tensor.numel():
            continue
        base = _share(tensor, memories)
        places[name] = ShardPlace(
            memory=list(memories).index(base),
            offset=tensor.data_ptr() - base,
            address=tensor.data_ptr(),
            dtype=tensor.dtype,
        )
    handles, sizes = zip(*memories.values(), strict=True) if memories else ((), ())
    return RankShards(rank=rank, host=host, gpu=gpu, memories=handles, sizes=sizes, places=places)


class OpenShards:
    """Other processes' memory, opened in this one."""

    def __init__(self, shards: Sequence[RankShards] = ()) -> None:
        """Raise RuntimeError, naming the rank, where a memory cannot be opened."""
        self.places = {each.rank: each.places for each in shards}
        self._bases: dict[int, list[int]] = {}
        self._maps: list[torch.Tensor] = []
        self._on_gpu: list[int] = []
        for each in shards:
            try:
                opened = [self._open(*memory) for memory in zip(each.memories, each.sizes, strict=True)]
            except (RuntimeError, OSError) as error:
                self.close()
                raise RuntimeError(f"the memory of trainer rank {each.rank} cannot be opened: {error}") from error
            self._bases[each.rank] = opened

    def _open(self, handle: bytes | str, nbytes: int) -> int:
        if isinstance(handle, bytes):
            self._on_gpu.append(open_allocation(handle))
            return self._on_gpu[-1]
        with open(handle, "r+b") as file:
            self._maps.append(torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8))
        return self._maps[-1].data_ptr()

    def find(self, rank: int, live_name: str) -> tuple[int, torch.dtype]:
        """Return the address of a rank's part of a live tensor, and the dtype in which it is held."""
        place = self.places[rank][live_name]
        return self._bases[rank][place.memory] + place.offset, place.dtype

    def close(self) -> None:
        """Close it all; no address that was found may be used any more."""
        for base in self._on_gpu:
            close_allocation(base)
        self.places, self._maps, self._on_gpu = {}, [], []


def have_moved(live: Mapping[str, torch.Tensor], exported: RankShards) -> bool:
    """Return whether a shard lies elsewhere than where it was exported."""
    return any(local(live[name]).data_ptr() != place.address for name, place in exported.places.items())


def _check_room(tensors: Iterable[torch.Tensor]) -> None:
    """Raise MemoryError where the host's shared memory has no room: the kernel would kill this rank as it is filled."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors if not each.is_cuda}
    missing = sum(each.nbytes() for each in storages.values() if not each.is_shared())
    free = shutil.disk_usage("/dev/shm").free // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if missing else 0
    if missing > free:
        raise MemoryError(
            f"/dev/shm must have room for the shards of each rank, {missing >> 20} MiB, got {free >> 20} MiB: in a"
            ' container, give it more (--shm-size), or use weights.transport "bucket" and weights.verify "log_probs".'
        )


def _share(tensor: torch.Tensor, memories: dict[int, tuple[bytes | str, int]]) -> int:
    """Return the address of the memory that holds the tensor, and enter it where it is new."""
    if tensor.is_cuda:
        address = tensor.data_ptr()
        for base, (_, nbytes) in memories.items():
            if base <= address < base + nbytes:
                return base
        found = export_allocation(address)
        memories[found.base] = found.handle, found.nbytes
        return found.base
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in memories or not storage.is_shared():
        descriptor, nbytes = storage._share_fd_cpu_()
        memories[storage.data_ptr()] = f"/proc/{os.getpid()}/fd/{descriptor}", nbytes
    return storage.data_ptr()
