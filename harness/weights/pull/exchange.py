"""What crosses the network before a pull: elements that no trainer rank beside the scheduler's GPU can show it.

A scheduler opens the memory of all trainer ranks of its island (a host, or one rank alone). What other ranks own is sent
to a staging buffer of one rank of the island first, each element box once, in batches of a bounded size; the schedulers of
the island then copy it from there.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import gcd, prod

import torch
import torch.distributed as dist

from harness.trainer.offload import local
from harness.weights.groups import aligned
from harness.weights.pull.regions import Region, merged

SEGMENT_ALIGNMENT = 16
"""Bytes: where the parcels of one owner may begin in a staging buffer."""
_Pairs = Sequence[tuple[int, "Need"]]
"""(receiver, need)."""


@dataclass(frozen=True, slots=True)
class Need:
    """Elements of a trainer rank's shard that a scheduler reads and cannot open: a strided box."""

    owner: int
    """The trainer rank that holds them."""
    live_name: str
    group: int
    """Number of the fusing group that they are needed with."""
    source: int
    """Elements from the first of the owner's shard."""
    axes: tuple[tuple[int, int], ...]
    """(size, source stride), by stride, largest first; sizes of 1 are left out."""
    dtype: torch.dtype
    """As they are sent: what the owner holds wider is cast before."""

    @classmethod
    def of(cls, region: Region, live_name: str, group: int, dtype: torch.dtype) -> "Need":
        """Return what the region reads; equal for regions that read the same box, however they write it."""
        axes = merged((size, step, step) for size, step, _ in region.axes if step)
        return cls(region.owner, live_name, group, region.source, tuple(axis[:2] for axis in axes), dtype)

    @property
    def numel(self) -> int:
        return prod(size for size, _ in self.axes)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def view(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the elements, in the shape of the axes, as a view of the owner's contiguous shard."""
        sizes, strides = [size for size, _ in self.axes], [stride for _, stride in self.axes]
        return shard.as_strided(sizes, strides, shard.storage_offset() + self.source)


@dataclass(frozen=True, slots=True)
class Parcel:
    """One need on its way: packed contiguously, in the order of its axes, into the receiver's staging buffer."""

    need: Need
    receiver: int
    """Trainer rank."""
    offset: int
    """Bytes from the first of the staging buffer; a multiple of the element size."""

    def view(self, staging: torch.Tensor) -> torch.Tensor:
        """Return its elements, in the shape of the need's axes, in a staging buffer, uint8 [bytes]."""
        found = staging[self.offset : self.offset + self.need.nbytes].view(self.need.dtype)
        return found.view([size for size, _ in self.need.axes])


@dataclass(frozen=True, slots=True)
class PullBatch:
    """The fusing groups from number `start` to before `stop`, whose parcels arrive together."""

    start: int
    stop: int
    parcels: tuple[Parcel, ...]
    """By receiver, owner and offset: what one owner sends to one receiver lies side by side there, without gaps."""


def packed(region: Region) -> Region:
    """Return the region as it reads the parcel of its need: from the parcel's first element, in the parcel's strides."""
    axes, step = list(region.axes), 1
    for place in sorted(range(len(axes)), key=lambda place: axes[place][1]):
        size, source_step, target_step = axes[place]
        axes[place] = size, step if source_step else 0, target_step
        step *= size if source_step else 1
    return replace(region, source=0, axes=tuple(axes))


def plan_exchange(
    needs: Mapping[int, Iterable[Need]], islands: Mapping[int, Hashable], groups: int, limit_bytes: int
) -> tuple[PullBatch, ...]:
    """Return batches that bring every need to a rank of its island, and together cover all groups; the same on all ranks.

    needs: by the trainer rank beside the scheduler. islands: of every trainer rank. Equal needs of an island are sent once,
    to the rank of it that receives fewest bytes so far; boxes that overlap without being equal are all sent whole.
    limit_bytes: of one staging buffer; one that exceeds it holds a single group.
    Raise ValueError for a rank without an island, and for a need whose owner is of the island itself.
    """
    if missing := sorted(needs.keys() - islands.keys()):
        raise ValueError(f"islands must name every trainer rank with needs, got none for {missing}")
    members: dict[Hashable, list[int]] = defaultdict(list)
    for rank in sorted(islands):
        members[islands[rank]].append(rank)
    by_group: list[list[tuple[int, Need]]] = [[] for _ in range(groups)]
    for ranks in members.values():
        received = dict.fromkeys(ranks, 0)
        for need in sorted({need for rank in ranks for need in needs.get(rank, ())}, key=_largest_first):
            if need.owner in received:
                raise ValueError(f"{need} must not be sent, as its island, ranks {ranks}, can open rank {need.owner}")
            receiver = min(ranks, key=received.__getitem__)
            received[receiver] += need.nbytes
            by_group[need.group].append((receiver, need))
    return tuple(_batches(by_group, limit_bytes))


def _largest_first(need: Need) -> tuple[object, ...]:
    """Order distinct needs in one way on every rank: by group, and within one by bytes, so that receivers balance."""
    return need.group, -need.nbytes, need.owner, need.live_name, need.source, need.axes, str(need.dtype)


def _batches(by_group: Sequence[_Pairs], limit_bytes: int) -> Iterator[PullBatch]:
    segments: Counter[tuple[int, int]] = Counter()
    filled: Counter[int] = Counter()

    def grow(pairs: _Pairs) -> None:
        for receiver, need in pairs:
            before = segments[receiver, need.owner]
            segments[receiver, need.owner] += need.nbytes
            filled[receiver] += aligned(before + need.nbytes, SEGMENT_ALIGNMENT) - aligned(before, SEGMENT_ALIGNMENT)

    start = 0
    for group, pairs in enumerate(by_group):
        growing = filled.keys() & {receiver for receiver, _ in pairs}
        grow(pairs)
        if any(filled[receiver] > limit_bytes for receiver in growing):
            yield _batch(start, group, by_group)
            start = group
            segments.clear()
            filled.clear()
            grow(pairs)
    yield _batch(start, len(by_group), by_group)


def _batch(start: int, stop: int, by_group: Sequence[_Pairs]) -> PullBatch:
    """Lay out the parcels. Those of sizes that more powers of two divide come first, so that none needs padding."""
    pairs = sorted(
        (pair for pairs in by_group[start:stop] for pair in pairs),
        key=lambda pair: (pair[0], pair[1].owner, -gcd(pair[1].nbytes, SEGMENT_ALIGNMENT)),
    )
    ends: Counter[int] = Counter()
    parcels = []
    for (receiver, _), segment in groupby(pairs, key=lambda pair: (pair[0], pair[1].owner)):
        ends[receiver] = aligned(ends[receiver], SEGMENT_ALIGNMENT)
        for _, need in segment:
            parcels.append(Parcel(need, receiver, ends[receiver]))
            ends[receiver] += need.nbytes
    return PullBatch(start, stop, tuple(parcels))


def staging_bytes(batches: Iterable[PullBatch]) -> int:
    """Return the size of the staging buffer that holds any batch on any receiver."""
    return max((each.offset + each.need.nbytes for batch in batches for each in batch.parcels), default=0)


@torch.no_grad()
def exchange(batch: PullBatch, live: Mapping[str, torch.Tensor], staging: torch.Tensor) -> int:
    """Send what this rank owns of the batch and receive its parcels; return the bytes sent over the network.

    live: this rank's live tensors, by name. staging: uint8, of at least staging_bytes(batches), on the device of the
    live tensors; no scheduler may still read the batch before. On a GPU what has arrived is ordered on the current
    stream, not waited for. Only ranks with parcels in the batch take part, so that on NCCL a collective call of all ranks
    must have come before.
    """
    rank = dist.get_rank()
    outgoing: dict[int, list[Parcel]] = defaultdict(list)
    incoming: dict[int, list[Parcel]] = defaultdict(list)
    for each in batch.parcels:
        if each.need.owner == rank:
            outgoing[each.receiver].append(each)
        elif each.receiver == rank:
            incoming[each.need.owner].append(each)
    sent = {receiver: _pack(parcels, live, staging.device) for receiver, parcels in outgoing.items()}
    operations = [dist.P2POp(dist.isend, sent[peer], peer) for peer in sent]
    for owner, parcels in incoming.items():
        segment = staging[parcels[0].offset : parcels[-1].offset + parcels[-1].need.nbytes]
        operations.append(dist.P2POp(dist.irecv, segment, owner))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return sum(message.numel() for message in sent.values())


def _pack(parcels: Sequence[Parcel], live: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return one message, uint8: the parcels as they lie in the receiver's staging buffer."""
    first = parcels[0].offset
    message = torch.empty(parcels[-1].offset + parcels[-1].need.nbytes - first, dtype=torch.uint8, device=device)
    for each in parcels:
        shard = local(live[each.need.live_name]).contiguous()
        replace(each, offset=each.offset - first).view(message).copy_(each.need.view(shard))
    return message
