"""Compare 64-bit fingerprints of every element that the engine holds with the trainer's, without moving any.

Each scheduler sums up what it holds, each trainer rank its shards (worker/model_state.py says how). That costs one read of
the weights; it names the tensors in which something differs, and readback.py, which moves every element, says how much.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from harness.cluster.world import all_gather
from harness.weights.gather import Piece
from harness.weights.snapshot import report_of_schedulers
from harness.weights.sync import WeightSync
from harness.weights.worker.model_state import WRAP, weighted_sum

Unit = tuple[int, int]
"""Bucket, and the number of a group of entries in it: what may fuse, so that its elements are summed together."""
Box = tuple[str, int, tuple[tuple[int, int], ...]]
"""What a copy reads: name, offset and steps; equal for ranks that hold the same elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FingerprintComparison:
    """The outcome of one comparison; the same on every rank."""

    tensors: int
    compared: int
    """Those whose every element is known to equal the trainer's; the others arrive in ways that cannot be followed."""
    wrong: tuple[str, ...]
    """Names of tensors, or of such as fuse with them, that the engine does not hold as the trainer does."""


def compare_fingerprints(sync: WeightSync) -> FingerprintComparison:
    """Compare, after a push that traced the schedulers' loaders. A collective call of all ranks.

    Raise RuntimeError where the schedulers cannot report what they hold.
    """
    expected, received = _trainer_sums(sync), _engine_sums(sync)
    compared, mine = 0, []
    for unit, names, boxes in _followed(sync):
        compared += len(names)
        total = 0
        for box, copies in boxes.items():
            found = {received[rank][part] for rank, part in copies}
            total += min(found)
            mine += [box[0]] * (len(found) > 1)
        mine += names if total % WRAP != expected[unit] else []
    wrong = tuple(dict.fromkeys(name for each in all_gather(mine) for name in each))
    return FingerprintComparison(tensors=len(sync.layout), compared=compared, wrong=wrong)


@torch.no_grad()
def _trainer_sums(sync: WeightSync) -> dict[Unit, int]:
    """Return what the shards of all ranks add up to, in the dtype in which they are sent."""
    pieces = [(index, piece) for index, bucket in enumerate(sync.buckets) for piece in bucket.pieces]
    sums = torch.stack([_sum_of(piece, sync.live[piece.live_name].detach()) for _, piece in pieces])
    totals: dict[Unit, int] = {}
    for mine in all_gather(sums.tolist()):
        for (index, piece), number in zip(pieces, mine, strict=True):
            totals[index, piece.group] = (totals.get((index, piece.group), 0) + number) % WRAP
    return totals


def _sum_of(piece: Piece, tensor: torch.Tensor) -> torch.Tensor:
    """Sum this rank's rows of a piece; of a tensor that is not sharded, on rank 0 alone."""
    dtype = piece.chunks.dtype
    first = piece.offset // dtype.itemsize
    if isinstance(tensor, DTensor):
        rows = tensor.to_local()[piece.start : piece.stop]
        first += tensor.device_mesh.get_local_rank() * (piece.stop - piece.start) * piece.chunks.row_elements
    elif dist.get_rank() == 0:
        rows = tensor[piece.start : piece.stop] if tensor.ndim else tensor
    else:
        rows = tensor.reshape(-1)[:0]
    return weighted_sum(rows.to(dtype).reshape(-1), (1,), first)


def _engine_sums(sync: WeightSync) -> dict[int, dict[str, int]]:
    """Return engine rank -> "<bucket>/<copy>" -> sum, of all schedulers of this rank's engine."""
    for attempt in range(2):
        if attempt:
            sync.trace_again()  # SGLang has put other tensors in the place of those that were traced
        reports = all_gather(report_of_schedulers(sync.engine, "copies"), sync.engine.group.process_group)
        found = {report.rank: report.tensors for each in reports for report in each}
        due = {each.rank: sum(map(len, each.regions)) for each in sync.coverage}
        if {rank: len(sums) for rank, sums in found.items()} == due:
            return found
    raise RuntimeError(f"fingerprints must come from schedulers with {due} copies, got them from {found.keys()}")


def _followed(sync: WeightSync) -> Iterator[tuple[Unit, list[str], dict[Box, list[tuple[int, str]]]]]:
    """Yield each unit whose every element is held once, as wide as it was sent: its names, box -> (rank, copy) of each."""
    lost = {name for each in sync.coverage for name in each.opaque}
    for index, bucket in enumerate(sync.buckets):
        boxes: dict[int, dict[Box, list[tuple[int, str]]]] = {entry.group: {} for entry in bucket.entries}
        group_of = {entry.name: entry.group for entry in bucket.entries}
        for each in sync.coverage:
            for part, region in enumerate(each.regions[index]):
                box = region.name, region.offset, region.steps
                boxes[group_of[region.name]].setdefault(box, []).append((each.rank, f"{index}/{part}"))
                if torch.promote_types(region.dtype, region.target_dtype) != region.target_dtype:
                    lost.add(region.name)
        for group, found in boxes.items():
            entries = [entry for entry in bucket.entries if entry.group == group]
            names = [entry.name for entry in entries]
            read = sum(prod(size for _, size in steps) for _, _, steps in found)
            if lost.isdisjoint(names) and read == sum(entry.numel for entry in entries):
                yield (index, group), names, found
