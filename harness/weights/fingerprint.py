"""Does the engine hold what the trainer holds? Asked after every sync, of every element, without moving any.

Each scheduler sums up what it holds, each trainer rank its shards (rollout/worker/fingerprint.py says how), and the sums
are compared. It is as cheap as reading the weights once, so that the default level affords it; it says only of which
tensors something differs, and readback.py, which moves every element, says what.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from harness.cluster.world import World, all_gather
from harness.weights.gather import Bucket, Chunks, Piece
from harness.weights.snapshot import inspect
from harness.weights.sync import WeightSync
from harness.weights.worker.reader import LoadCoverage, Region
from harness.weights.worker.scheduler_fingerprint import FINGERPRINT, weighted_sum

Unit = tuple[int, int]
"""Bucket, and the number of a group of entries in it: what may fuse, so that its elements are summed together."""
WRAP = 1 << 64


@dataclass(frozen=True, slots=True)
class Box:
    """Which elements of a slot a copy reads; equal for ranks that hold the same ones."""

    numel: int
    places: object

    @classmethod
    def of(cls, region: Region) -> "Box":
        if region.index is not None:
            places = region.index.flatten()
            return cls(len(places), hashlib.sha256(places.numpy().tobytes()).hexdigest())
        shape = [size if stride else min(size, 1) for stride, size in zip(region.stride, region.shape, strict=True)]
        steps = (pair for pair in zip(region.stride, shape, strict=True) if pair[1] > 1)
        return cls(torch.Size(shape).numel(), (region.offset, *sorted(steps)))


@dataclass(frozen=True, kw_only=True, slots=True)
class FingerprintComparison:
    """What one comparison said; the same on every rank."""

    tensors: int
    """Of the checkpoint."""
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
    _followed: "tuple[Sequence[LoadCoverage], Followed] | None" = None

    def compare(self) -> FingerprintComparison:
        """A collective call of all ranks, after a push that asked the schedulers. Raises RuntimeError where they cannot say
        what they hold."""
        expected = self.expected()
        held = self.held()
        mine, now = self.followed().check(expected, held)
        wrong = tuple(dict.fromkeys(name for each in all_gather(mine) for name in each))
        unchanged = sum(len(names) for names, sums in now.items() if self.before.get(names) == sums)
        found = FingerprintComparison(
            tensors=len(self.sync.layout),
            compared=len({name for names in now for name in names}),
            unchanged=unchanged if self.before else None,
            wrong=wrong,
        )
        self.before = now
        return found

    def followed(self) -> "Followed":
        """Of what the schedulers said last."""
        if self._followed is None or self._followed[0] is not self.sync.coverage:
            self._followed = self.sync.coverage, Followed.of(self.sync.buckets, self.sync.coverage)
        return self._followed[1]

    @torch.no_grad()
    def expected(self) -> dict[Unit, int]:
        """What the trainer's shards add up to, in the dtype in which they are sent. A collective call of all ranks."""
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
        """Of this rank's rows of a piece; of a tensor that is not sharded, on rank 0 alone."""
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

    def held(self) -> dict[int, dict[str, int]]:
        """Engine rank -> "<bucket>/<part>" -> sum, of all schedulers of this rank's engine. A collective call."""
        for attempt in range(2):
            reports = all_gather(inspect(self.sync.engine, FINGERPRINT), self.sync.engine.group.process_group)
            found = {report.rank: report.tensors for each in reports for report in each}
            due = {arrival.rank: sum(map(len, arrival.regions)) for arrival in self.sync.coverage}
            if {rank: len(sums) for rank, sums in found.items()} == due:
                return {rank: {key: int(text) for key, text in sums.items()} for rank, sums in found.items()}
            if attempt == 0:
                self.sync.ask_again()  # SGLang has put other tensors in the place of those it was asked about
        raise RuntimeError(f"the schedulers say {found.keys()} of the weights that they hold, and {due} were due")


@dataclass(frozen=True, kw_only=True, slots=True)
class Followed:
    """Which sums of which schedulers make up a unit."""

    names: dict[Unit, tuple[str, ...]]
    """Of each unit's tensors."""
    boxes: dict[Unit, dict[Box, list[tuple[int, str]]]]
    """Box -> (engine rank, part) of each copy of it."""
    box_names: dict[tuple[Unit, Box], tuple[str, ...]]

    @classmethod
    def of(cls, buckets: Sequence[Bucket], coverage: Sequence[LoadCoverage]) -> "Followed":
        """Units that cannot be followed, and units of which elements are read twice in different boxes, are left out."""
        followed = cls(names={}, boxes={}, box_names={})
        opaque = {name for arrival in coverage for name in arrival.opaque}
        for index, bucket in enumerate(buckets):
            unit_of = {entry.name: (index, entry.group) for entry in bucket.entries}
            sizes: dict[Unit, int] = {}
            lost = {unit_of[name] for name in opaque & unit_of.keys()}
            for entry in bucket.entries:
                unit = unit_of[entry.name]
                sizes[unit] = sizes.get(unit, 0) + entry.numel
                followed.names[unit] = (*followed.names.get(unit, ()), entry.name)
            for arrival in coverage:
                for part, region in enumerate(arrival.regions[index]):
                    unit, box = unit_of[region.names[0]], Box.of(region)
                    if not _is_followed(region):
                        lost.add(unit)
                    copies = followed.boxes.setdefault(unit, {}).setdefault(box, [])
                    copies.append((arrival.rank, f"{index}/{part}"))
                    followed.box_names[unit, box] = region.names
            for unit, size in sizes.items():
                if unit in lost or sum(box.numel for box in followed.boxes.get(unit, ())) != size:
                    followed.boxes.pop(unit, None)
        return followed

    def check(
        self, expected: Mapping[Unit, int], held: Mapping[int, Mapping[str, int]]
    ) -> tuple[list[str], dict[tuple[str, ...], list[int]]]:
        """(names of tensors of units that differ, names -> sums of their boxes)."""
        wrong: list[str] = []
        sums: dict[tuple[str, ...], list[int]] = {}
        for unit, boxes in self.boxes.items():
            total = 0
            for box, copies in boxes.items():
                found = {held[rank][part] for rank, part in copies}
                total += min(found)
                sums.setdefault(self.box_names[unit, box], []).append(min(found))
                if len(found) > 1:
                    wrong += self.box_names[unit, box]
            if total % WRAP != expected[unit]:
                wrong += self.names[unit]
        return wrong, sums


def _is_followed(region: Region) -> bool:
    """Whether each element that it reads is held once, and as wide as it was sent."""
    repeats = region.index is not None and len(region.index.unique()) < region.index.numel()
    return not repeats and torch.promote_types(region.dtype, region.target_dtype) == region.target_dtype
