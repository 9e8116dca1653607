"""Time weight syncs, next to an all-gather of the same bytes."""

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor

from harness.cluster.world import World, all_gather
from harness.runtime import GIB, MIB
from harness.weights.pull.transport import PullTransport
from harness.weights.sync import WeightSync
from harness.weights.trainer_weights import TrainerWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRow:
    """One way of moving all weights, as the slowest rank measured it."""

    way: str
    seconds: float
    """Median over the repetitions."""
    fastest: float
    nbytes: int
    first: float | None = None
    """Seconds of the first sync, with all that is made once."""
    extra_bytes: int | None = None
    """GPU memory, of trainer and engine together, that the syncs left taken."""


def all_gather_row(weights: TrainerWeights, world: World, repeats: int) -> BenchRow:
    """Time an all-gather of the same bytes: what the links could do. A collective call of all ranks, as all here."""
    groups = (each.device_mesh.get_group() for each in weights.tensors.values() if isinstance(each, DTensor))
    group = next(groups, dist.group.WORLD)
    assert group is not None
    ranks = dist.get_world_size(group)
    at_once = min(GIB if world.device.type == "cuda" else 64 * MIB, weights.nbytes) // ranks * ranks
    whole = torch.empty(at_once, dtype=torch.uint8, device=world.device)
    part = torch.zeros(at_once // ranks, dtype=torch.uint8, device=world.device)

    def gather() -> None:
        left = weights.nbytes
        while left > 0:
            size = min(at_once, -(-left // ranks) * ranks)
            group.allgather_into_tensor_coalesced(
                [whole[:size]], [part[: size // ranks]]
            ).wait()  # as weights/gather.py
            left -= size

    gather()  # the first call makes NCCL's channels
    return _row("all-gather", weights.nbytes, [_timed(world, gather) for _ in range(repeats)])


def sync_row(name: str, sync: WeightSync, world: World, repeats: int) -> BenchRow:
    """Time a sync by the transport of that name."""
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()  # from here on the allocator keeps what a sync takes, so that its largest use shows
    before = _gpu_free(world) if on_gpu else 0
    first = _timed(world, sync.update_engine)
    seconds = [_timed(world, sync.update_engine) for _ in range(repeats)]
    extra = max(all_gather(before - _gpu_free(world))) if on_gpu else None
    return _row(name, sync.weights.nbytes, seconds, first, extra)


def bytes_line(transport: PullTransport, world: World) -> str:
    """Return what one pull reads of whose memory. A collective call of all ranks, after a sync."""
    read = transport.bytes_read()
    own, others = zip(*all_gather((read.get(world.rank, 0), sum(read.values()) - read.get(world.rank, 0))), strict=True)
    return (
        f"a pull reads {max(own) / 1e9:.3f} GB of the trainer next to it and {max(others) / 1e9:.3f} GB of the host's others,"
        " each on the rank that reads most"
    )


def as_table(rows: Sequence[BenchRow], weights: TrainerWeights) -> str:
    """Return the rows as a table for the console."""
    table = Table(title=f"{weights.nbytes / 1e9:.3f} GB, {len(weights.layout)} tensors, {len(weights.buckets)} buckets")
    for heading in ("way", "seconds", "fastest", "first", "GB/s", "extra, MiB"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for row in rows:
        first = "" if row.first is None else f"{row.first:.4f}"
        extra = "" if row.extra_bytes is None else f"{row.extra_bytes / MIB:.0f}"
        rate = f"{row.nbytes / row.seconds / 1e9:.1f}"
        table.add_row(row.way, f"{row.seconds:.4f}", f"{row.fastest:.4f}", first, rate, extra)
    text = io.StringIO()
    Console(width=110, color_system=None, file=text).print(table)
    return text.getvalue().rstrip()


def _row(
    way: str, nbytes: int, seconds: Sequence[float], first: float | None = None, extra_bytes: int | None = None
) -> BenchRow:
    return BenchRow(
        way=way, seconds=median(seconds), fastest=min(seconds), nbytes=nbytes, first=first, extra_bytes=extra_bytes
    )


def _gpu_free(world: World) -> int:
    """Return the free bytes of this rank's GPU, whichever process uses the rest."""
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info(world.device)[0])


def _timed(world: World, call: Callable[[], object]) -> float:
    """Return seconds from when all ranks are ready until the last one, its GPU included, is done; alike on every
    rank.
    """
    finish = torch.cuda.synchronize if world.device.type == "cuda" else lambda: None
    finish()
    dist.barrier()
    started = time.perf_counter()
    call()
    finish()
    return float(max(all_gather(time.perf_counter() - started)))
