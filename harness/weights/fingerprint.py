"""Compare 64-bit fingerprints of every element that the engine holds with the trainer's, without moving any.

Each scheduler sums up what it holds, each trainer rank its shards (worker/model_state.py says how), and the sums
are compared. It costs one read of the weights, so that the default level affords it; it names only the tensors in which
something differs, and readback.py, which moves every element, says how much.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from harness.cluster.world import World, all_gather
from harness.weights.gather import Bucket, Chunks, Piece
from harness.weights.snapshot import report_of_schedulers
from harness.weights.stream.slots import Region
from harness.weights.sync import WeightSync
from harness.weights.worker.model_state import FINGERPRINT, WRAP, weighted_sum
from harness.weights.worker.reader import LoadCoverage

Unit = tuple[int, int]
"""Bucket, and the number of a group of entries in it: what may fuse, so that its elements are summed together."""
Box = tuple[int, object]
"""How many elements of a slot a copy reads, and which; equal for ranks that hold the same ones."""


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
    before: dict[tuple[str, ...], list[int]] = field(default_factory=dict)
    """Names of tensors -> the sums of their boxes at the last comparison."""
    _parts: "tuple[Sequence[LoadCoverage], _Parts] | None" = None

    def compare(self) -> FingerprintComparison:
        """Compare, after a push that traced the schedulers' loaders. A collective call of all ranks.

        Raise RuntimeError where the schedulers cannot report what they hold.
        """
        expected, received = self._trainer_sums(), self._engine_sums()
        if self._parts is None or self._parts[0] is not self.sync.coverage:
            self._parts = self.sync.coverage, _Parts(self.sync.buckets, self.sync.coverage)
        mine, now = self._parts[1].compare(expected, received)
        unchanged = sum(len(names) for names, sums in now.items() if self.before.get(names) == sums)
        found = FingerprintComparison(
            tensors=len(self.sync.layout),
            compared=len({name for names in now for name in names}),
            unchanged=unchanged if self.before else None,
            wrong=tuple(dict.fromkeys(name for each in all_gather(mine) for name in each)),
        )
        self.before = now
        return found

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
        totals: dict[Unit, int] = {}
        for mine in all_gather(torch.stack(sums).tolist()):
            for unit, number in zip(units, mine, strict=True):
                totals[unit] = (totals.get(unit, 0) + number) % WRAP
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
        for attempt in range(2):
            engine = self.sync.engine
            reports = all_gather(report_of_schedulers(engine, FINGERPRINT), engine.group.process_group)
            found = {report.rank: report.tensors for each in reports for report in each}
            due = {each.rank: sum(map(len, each.regions)) for each in self.sync.coverage}
            if {rank: len(sums) for rank, sums in found.items()} == due:
                return {rank: {key: int(text) for key, text in sums.items()} for rank, sums in found.items()}
            if attempt == 0:
                self.sync.trace_again()  # SGLang has put other tensors in the place of those that were traced
        raise RuntimeError(f"fingerprints must come from schedulers with {due} copies, got them from {found.keys()}")


class _Parts:
    """Which sums of which schedulers make up a unit.

    Units that cannot be followed, and units of which elements are read twice in different boxes, are left out.
    """

    def __init__(self, buckets: Sequence[Bucket], coverage: Sequence[LoadCoverage]) -> None:
        self.names: dict[Unit, tuple[str, ...]] = {}
        self.boxes: dict[Unit, dict[Box, list[tuple[int, str]]]] = {}
        """Box -> (engine rank, "<bucket>/<copy>") of each copy of it."""
        self.box_names: dict[tuple[Unit, Box], tuple[str, ...]] = {}
        opaque = {name for each in coverage for name in each.opaque}
        for index, bucket in enumerate(buckets):
            unit_of = {entry.name: (index, entry.group) for entry in bucket.entries}
            sizes: dict[Unit, int] = {}
            lost = {unit_of[name] for name in opaque & unit_of.keys()}
            for entry in bucket.entries:
                unit = unit_of[entry.name]
                sizes[unit] = sizes.get(unit, 0) + entry.numel
                self.names[unit] = (*self.names.get(unit, ()), entry.name)
            for each in coverage:
                for part, region in enumerate(each.regions[index]):
                    unit, box = unit_of[region.names[0]], _box_of(region)
                    if not _is_followed(region):
                        lost.add(unit)
                    self.boxes.setdefault(unit, {}).setdefault(box, []).append((each.rank, f"{index}/{part}"))
                    self.box_names[unit, box] = region.names
            for unit, size in sizes.items():
                if unit in lost or sum(numel for numel, _ in self.boxes.get(unit, ())) != size:
                    self.boxes.pop(unit, None)

    def compare(
        self, expected: Mapping[Unit, int], received: Mapping[int, Mapping[str, int]]
    ) -> tuple[list[str], dict[tuple[str, ...], list[int]]]:
        """Return (names of tensors of units that differ, names -> sums of their boxes)."""
        wrong: list[str] = []
        sums: dict[tuple[str, ...], list[int]] = {}
        for unit, boxes in self.boxes.items():
            total = 0
            for box, copies in boxes.items():
                found = {received[rank][part] for rank, part in copies}
                total += min(found)
                sums.setdefault(self.box_names[unit, box], []).append(min(found))
                if len(found) > 1:
                    wrong += self.box_names[unit, box]
            if total % WRAP != expected[unit]:
                wrong += self.names[unit]
        return wrong, sums


def _box_of(region: Region) -> Box:
    if region.index is not None:
        places = region.index.flatten()
        return len(places), hashlib.sha256(places.numpy().tobytes()).hexdigest()
    numel = 0 if 0 in region.shape else torch.Size([size for _, size in region.steps]).numel()
    return numel, (region.offset, region.steps)


def _is_followed(region: Region) -> bool:
    """Return whether each element that it reads is held once, and as wide as it was sent."""
    repeats = region.index is not None and len(region.index.unique()) < region.index.numel()
    return not repeats and torch.promote_types(region.dtype, region.target_dtype) == region.target_dtype
