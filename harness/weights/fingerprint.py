"""Compare 64-bit fingerprints of every element that the engine holds with the trainer's, without moving any.

Each scheduler sums up what it holds, each trainer rank its shards (worker/model_state.py says how). That costs one read of
the weights; it names the tensors in which something differs, and readback.py, which moves every element, says how much.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch.distributed.tensor import DTensor

from harness.cluster.world import World, all_gather
from harness.weights.gather import Chunks, Piece
from harness.weights.snapshot import report_of_schedulers
from harness.weights.stream.slots import SlotEntry
from harness.weights.sync import WeightSync
from harness.weights.worker.model_state import FINGERPRINT, WRAP, weighted_sum

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
    unchanged: int | None
    """Those of the compared that are as they were at the comparison before: their equality says nothing about the sync
    in between. None for the first one."""
    wrong: tuple[str, ...]
    """Names of tensors, or of such as fuse with them, that the engine does not hold as the trainer does."""


@dataclass(kw_only=True, slots=True)
class Fingerprints:
    """The comparisons of one sync's engine and trainer on one rank."""

    sync: WeightSync
    world: World
    before: dict[str, list[int]] = field(default_factory=dict)
    """Name -> the sums of its boxes at the last comparison."""

    def compare(self) -> FingerprintComparison:
        """Compare, after a push that traced the schedulers' loaders. A collective call of all ranks.

        Raise RuntimeError where the schedulers cannot report what they hold.
        """
        expected, received = self._trainer_sums(), self._engine_sums()
        mine: list[str] = []
        now: dict[str, list[int]] = {}
        for unit, names, boxes in self._followed():
            total = 0
            for box, copies in boxes.items():
                found = {received[rank][part] for rank, part in copies}
                total += min(found)
                now.setdefault(box[0], []).append(min(found))
                mine += [box[0]] * (len(found) > 1)
            mine += names if total % WRAP != expected[unit] else []
        unchanged = sum(self.before.get(name) == sums for name, sums in now.items()) if self.before else None
        self.before = now
        wrong = tuple(dict.fromkeys(name for each in all_gather(mine) for name in each))
        return FingerprintComparison(tensors=len(self.sync.layout), compared=len(now), unchanged=unchanged, wrong=wrong)

    @torch.no_grad()
    def _trainer_sums(self) -> dict[Unit, int]:
        """Return what the shards of all ranks add up to, in the dtype in which they are sent."""
        live_names = {tensor.name: tensor.live_name for tensor in self.sync.layout}
        units, sums = [], []
        for index, bucket in enumerate(self.sync.buckets):
            sent_as = {live_names[entry.name]: entry for entry in bucket.entries}
            for piece in bucket.pieces:
                entry = sent_as[piece.live_name]
                units.append((index, entry.group))
                sums.append(self._sum_of(piece, entry.dtype))
        totals = dict.fromkeys(units, 0)
        for mine in all_gather(torch.stack(sums).tolist()):
            for unit, number in zip(units, mine, strict=True):
                totals[unit] = (totals[unit] + number) % WRAP
        return totals

    def _sum_of(self, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
        """Sum this rank's rows of a piece; of a tensor that is not sharded, on rank 0 alone."""
        tensor = self.sync.live[piece.live_name].detach()
        first = piece.offset // dtype.itemsize
        if isinstance(tensor, DTensor):
            rows = tensor.to_local()[piece.start : piece.stop]
            at = tensor.device_mesh.get_local_rank() * (piece.stop - piece.start)
            first += at * Chunks.of(tensor, dtype).row_elements
        elif self.world.rank == 0:
            rows = tensor[piece.start : piece.stop] if tensor.ndim else tensor
        else:
            rows = tensor.reshape(-1)[:0]
        return weighted_sum(rows.to(dtype).reshape(-1), (1,), first)

    def _engine_sums(self) -> dict[int, dict[str, int]]:
        """Return engine rank -> "<bucket>/<copy>" -> sum, of all schedulers of this rank's engine."""
        engine = self.sync.engine
        for attempt in range(2):
            if attempt:
                self.sync.trace_again()  # SGLang has put other tensors in the place of those that were traced
            reports = all_gather(report_of_schedulers(engine, FINGERPRINT), engine.group.process_group)
            found = {report.rank: report.tensors for each in reports for report in each}
            due = {each.rank: sum(map(len, each.regions)) for each in self.sync.coverage}
            if {rank: len(sums) for rank, sums in found.items()} == due:
                return found
        raise RuntimeError(f"fingerprints must come from schedulers with {due} copies, got them from {found.keys()}")

    def _followed(self) -> Iterator[tuple[Unit, list[str], dict[Box, list[tuple[int, str]]]]]:
        """Yield the units of which every element is held once and as wide as it was sent.

        With the names of their tensors, and box -> (engine rank, "<bucket>/<copy>") of each copy of it.
        """
        for index, bucket in enumerate(self.sync.buckets):
            lost = {name for each in self.sync.coverage for name in each.opaque}
            group_of = {entry.name: entry.group for entry in bucket.entries}
            entries: dict[int, list[SlotEntry]] = {}
            boxes: dict[int, dict[Box, list[tuple[int, str]]]] = {}
            for entry in bucket.entries:
                entries.setdefault(entry.group, []).append(entry)
                boxes[entry.group] = {}
            for each in self.sync.coverage:
                for part, region in enumerate(each.regions[index]):
                    box = region.name, region.offset, region.steps
                    boxes[group_of[region.name]].setdefault(box, []).append((each.rank, f"{index}/{part}"))
                    if torch.promote_types(region.dtype, region.target_dtype) != region.target_dtype:
                        lost.add(region.name)
            for group, members in entries.items():
                names = [entry.name for entry in members]
                read = sum(prod(size for _, size in steps) for _, _, steps in boxes[group])
                if lost.isdisjoint(names) and read == sum(entry.numel for entry in members):
                    yield (index, group), names, boxes[group]
