"""What each trainer rank holds of the tensors that are sent, and where another process of its host finds it."""

import mmap
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from harness.trainer.offload import local
from harness.trainer.rows import RowShards
from harness.weights.pull.gpu_memory import close_allocation, export_allocation, open_allocation
from harness.weights.regions import Cut, cut_by_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlace:
    """Where a rank's part of one tensor begins."""

    memory: int
    """Which of the rank's memories holds it, as an index."""
    offset_bytes: int
    """From the first byte of that memory."""
    address: int
    """In the rank's own process; if it is another one later, the shard has moved."""
    dtype: torch.dtype
    """As the rank holds it, which may be wider than it is sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShards:
    """All parts that one trainer rank holds."""

    rank: int
    host: str
    gpu: str | None
    """The rank's GPU, as CUDA_VISIBLE_DEVICES of its host names it; None on the CPU."""
    memories: tuple[bytes | str, ...]
    """Handles of GPU allocations, or paths of shared memory of the CPU."""
    sizes: tuple[int, ...]
    """Bytes of each memory."""
    places: dict[str, ShardPlace]
    """By tensor name, without those of which the rank holds no element."""


def cuts_of(tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, tuple[Cut, ...]]:
    """Return who holds which elements of each tensor: FSDP2's rows, or this rank all of one that is not sharded."""
    return {
        name: cut_by_rows(
            RowShards.of(tensor), tensor.device_mesh.mesh.flatten().tolist() if isinstance(tensor, DTensor) else [rank]
        )
        for name, tensor in tensors.items()
    }


def export_shards(
    tensors: Mapping[str, torch.Tensor], rank: int, host: str, gpu: str | None, ranks_here: int
) -> RankShards:
    """Return this rank's parts. CPU tensors that are not in shared memory yet are moved there, in place.

    ranks_here: how many ranks of this host do the same.

    Raise MemoryError if shared memory has no room for them, CudaCallFailed if an allocation cannot be exported.
    """
    parts = {name: local(tensor) for name, tensor in tensors.items()}
    _check_room(parts.values(), ranks_here)
    memories: dict[int, tuple[bytes | str, int]] = {}
    places: dict[str, ShardPlace] = {}
    for name, tensor in parts.items():
        if not tensor.numel():
            continue
        base = _share(tensor, memories)
        places[name] = ShardPlace(
            memory=list(memories).index(base),
            offset_bytes=tensor.data_ptr() - base,
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

    def find(self, rank: int, name: str) -> tuple[int, torch.dtype]:
        """Return the address of a rank's part of a tensor, and the dtype in which it is held."""
        place = self.places[rank][name]
        return self._bases[rank][place.memory] + place.offset_bytes, place.dtype

    def close(self) -> None:
        """Close all of it; no address that was found may be used any more."""
        for base in self._on_gpu:
            close_allocation(base)
        self.places, self._maps, self._on_gpu = {}, [], []


def have_moved(tensors: Mapping[str, torch.Tensor], exported: RankShards) -> bool:
    """Return whether a shard is not where it was exported any more. Asked before each pull."""

    def address(tensor: torch.Tensor) -> int:
        # DTensor.to_local() takes ten times as long: 0.35 ms of each pull for the 339 tensors of Qwen2-7B.
        return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr()

    return any(address(tensors[name]) != place.address for name, place in exported.places.items())


def _check_room(tensors: Iterable[torch.Tensor], ranks_here: int) -> None:
    """Raise MemoryError if the host's shared memory has no room: the kernel would kill this rank when it is filled."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors if not each.is_cuda}
    missing = sum(each.nbytes() for each in storages.values() if not each.is_shared())
    free = shutil.disk_usage("/dev/shm").free // ranks_here if missing else 0
    if missing > free:
        raise MemoryError(
            f"/dev/shm must have room for the shards of each rank, {missing >> 20} MiB, got {free >> 20} MiB: in a"
            ' container, give it more (--shm-size), or use weights.transport "bucket".'
        )


def _share(tensor: torch.Tensor, memories: dict[int, tuple[bytes | str, int]]) -> int:
    """Return the address of the memory that holds the tensor; add that memory if it is new."""
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
