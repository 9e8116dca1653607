"""How long a sync takes, beside what the wire could do and what one tensor a call costs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist

from harness.cluster.world import World, all_gather
from harness.runtime.units import GIB, MIB
from harness.weights.gather import full_tensor, group_of
from harness.weights.sync import WeightSync

LIMIT_PIECE = GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRow:
    """One way of moving the same bytes."""

    way: str
    seconds: float
    """Median over the repetitions, of the slowest rank."""
    fastest: float
    nbytes: int
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds by part of the median repetition, on the rank where it was longest; parts overlap."""
    peak_extra_bytes: int | None = None
    """Most that the trainer's process held beyond what it held before, on any rank; None on the CPU."""

    @property
    def gigabytes_per_second(self) -> float:
        """10^9 bytes of checkpoint tensors a second: what each rank has gathered."""
        return self.nbytes / self.seconds / 1e9


def bench(sync: WeightSync, world: World, repeats: int, one_by_one: bool) -> list[BenchRow]:
    """Time the limit, the configured transport and, where asked, one tensor a call; a collective call of all ranks."""
    rows = [_row("all-gather of the same bytes", all_gather_limit(sync, world, repeats), sync.nbytes)]
    rows.append(_transport(sync, world, repeats))
    if one_by_one:
        seconds = [_timed(world, lambda: push_one_by_one(sync)) for _ in range(max(1, repeats // 5))]
        rows.append(_row("one tensor a call, as VerlEngine", seconds, sync.nbytes))
    return rows


def all_gather_limit(sync: WeightSync, world: World, repeats: int) -> list[float]:
    """Seconds of each repetition of a plain all-gather of as many bytes, in pieces, into one buffer."""
    group = group_of(sync.live) or dist.group.WORLD
    assert group is not None
    ranks = dist.get_world_size(group)
    piece = min(LIMIT_PIECE if world.device.type == "cuda" else 64 * MIB, sync.nbytes) // ranks * ranks
    whole = torch.empty(piece, dtype=torch.uint8, device=world.device)
    part = torch.zeros(piece // ranks, dtype=torch.uint8, device=world.device)

    def gather() -> None:
        left = sync.nbytes
        while left > 0:
            size = min(piece, -(-left // ranks) * ranks)
            group.allgather_into_tensor_coalesced([whole[:size]], [part[: size // ranks]]).wait()
            left -= size

    gather()  # the first makes NCCL's channels
    return [_timed(world, gather) for _ in range(repeats)]


def push_one_by_one(sync: WeightSync) -> None:
    """Every tensor gathered alone, its handles collected on the head, and a call of the engine for it: as the
    VerlEngine of sglang and verl did. What fuses on arrival is lost by it: for its time alone.
    """
    by_live_name: dict[str, list[int]] = {}
    for index, tensor in enumerate(sync.layout):
        by_live_name.setdefault(tensor.live_name, []).append(index)
    with sync.engine.weight_update():
        for name, indices in by_live_name.items():
            whole = full_tensor(sync.live[name], sync.layout[indices[0]].dtype)
            for index in indices:
                tensor = sync.layout[index]
                named = [(tensor.name, tensor.view(whole).contiguous())]
                sync.engine.update_weights_from_tensor(named, flush_cache=False)
    sync.engine.flush_cache()


def _transport(sync: WeightSync, world: World, repeats: int) -> BenchRow:
    sync.push()  # opens the slots and makes plans
    on_cuda = world.device.type == "cuda"
    before = torch.cuda.memory_allocated(world.device) - _slots(sync) if on_cuda else 0
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(world.device)
    runs = [(_timed(world, sync.push), sync.parts()) for _ in range(repeats)]
    peak = max(all_gather(torch.cuda.max_memory_allocated(world.device) - before)) if on_cuda else None
    seconds = [each for each, _ in runs]
    chosen = min(range(repeats), key=lambda index: abs(seconds[index] - median(seconds)))
    parts = all_gather(runs[chosen][1])
    longest = {name: max(each.get(name, 0.0) for each in parts) for name in parts[0]}
    return _row(f"transport {sync.transport_name}", seconds, sync.nbytes, longest, peak)


def _slots(sync: WeightSync) -> int:
    """Bytes of this rank's slots, which are already there when a later sync begins."""
    return sum(slot.numel() for slot in sync.link().link.slots) if sync.transport_name == "stream" else 0


def _row(
    way: str, seconds: Sequence[float], nbytes: int, parts: dict[str, float] | None = None, peak: int | None = None
) -> BenchRow:
    return BenchRow(
        way=way,
        seconds=median(seconds),
        fastest=min(seconds),
        nbytes=nbytes,
        parts=parts or {},
        peak_extra_bytes=peak,
    )


def _timed(world: World, call: Callable[[], object]) -> float:
    """Seconds from when all ranks are ready to when the last one, its GPU included, is done; the same on every rank."""
    _finish(world)
    dist.barrier()
    started = time.perf_counter()
    call()
    _finish(world)
    return float(max(all_gather(time.perf_counter() - started)))


def _finish(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
