"""Plan which shard elements each host must receive over the network before its schedulers can copy them, and send them.

A scheduler opens the memory of all trainer ranks of its island: a host, or one rank alone if the host's schedulers
cannot open each other's trainers' memory. What other ranks own is first sent to a staging buffer of one rank of the
island:

    rank 5's shard  --network-->  staging buffer of rank 1  --copy-->  schedulers of ranks 0, 1, 2, 3

Each box of elements is sent once to an island, in batches of a bounded size.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import gcd

import torch
import torch.distributed as dist

from harness.trainer.offload import local
from harness.weights.gather import aligned
from harness.weights.regions import Region, merged
from harness.weights.tensor_view import TensorView

SEGMENT_ALIGNMENT = 16
"""Bytes: where the parcels of one owner may begin in a staging buffer."""
_Pairs = Sequence[tuple[int, "Need"]]
"""(receiver, need)."""


@dataclass(frozen=True, slots=True)
class Need:
    """Elements of a trainer rank's shard that a scheduler reads and cannot open."""

    owner: int
    """The trainer rank that holds them."""
    group: int
    """Number of the fusing group that they are needed with."""
    elements: TensorView
    """Where they lie in the owner's shard. Its dtype is that in which they are sent: wider values are cast before."""

    @classmethod
    def of(cls, region: Region, name: str, group: int, dtype: torch.dtype) -> "Need":
        """Return what the region reads; equal for regions that read the same box, however they write it."""
        axes = merged((size, step, step) for size, step, _ in region.axes if step)
        shape, stride = tuple(size for size, _, _ in axes), tuple(step for _, step, _ in axes)
        view = TensorView(name="", of=name, dtype=dtype, shape=shape, stride=stride, offset=region.source)
        return cls(region.owner, group, view)

    @property
    def nbytes(self) -> int:
        return self.elements.nbytes


@dataclass(frozen=True, slots=True)
class Parcel:
    """One need on its way: packed contiguously, in the order of its axes, into the receiver's staging buffer."""

    need: Need
    receiver: int
    """Trainer rank."""
    offset_bytes: int
    """From the first byte of the staging buffer; a multiple of the element size."""

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.need.nbytes

    def view(self, staging: torch.Tensor) -> torch.Tensor:
        """Return its elements, in the shape of the need's axes, in a staging buffer, uint8 [bytes]."""
        elements = self.need.elements
        return staging[self.offset_bytes : self.end_bytes].view(elements.dtype).view(elements.shape)


@dataclass(frozen=True, slots=True)
class PullBatch:
    """The fusing groups from number `start` to before `stop`, whose parcels arrive together."""

    start: int
    stop: int
    parcels: tuple[Parcel, ...]
    """By receiver, owner and offset: what one owner sends to one receiver lies there side by side, without gaps."""


def packed(region: Region) -> Region:
    """Return the region as it reads the parcel of its need: from the parcel's first element, in the parcel's
    strides.
    """
    axes, step = list(region.axes), 1
    for place in sorted(range(len(axes)), key=lambda place: axes[place][1]):
        size, source_step, target_step = axes[place]
        axes[place] = size, step if source_step else 0, target_step
        step *= size if source_step else 1
    return replace(region, source=0, axes=tuple(axes))


def plan_exchange(
    needs: Mapping[int, Iterable[Need]], islands: Mapping[int, Hashable], groups: int, limit_bytes: int
) -> tuple[PullBatch, ...]:
    """Return batches that bring every need to a rank of its island, and together cover all groups; the same on all
    ranks.

    needs: by the trainer rank beside the scheduler. islands: of every trainer rank. Equal needs of an island are sent
    once, to the rank of it that receives fewest bytes so far; boxes that overlap without being equal are all sent
    whole. limit_bytes: of one staging buffer; one that exceeds it holds a single group. Raise ValueError for a rank
    without an island, and for a need whose owner is of the island itself.
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
    """Order distinct needs the same way on every rank: by group, then largest first, so that receivers balance."""
    view = need.elements
    return need.group, -need.nbytes, need.owner, view.of, view.offset, view.shape, view.stride, str(view.dtype)


@dataclass(slots=True)
class _Filled:
    """How full the staging buffers of the open batch are."""

    segments: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(receiver, owner) -> bytes; what one owner sends to one receiver is a segment, and begins aligned."""
    buffers: Counter[int] = field(default_factory=Counter)
    """Receiver -> bytes, with the gaps between segments."""

    def add(self, pairs: _Pairs) -> None:
        for receiver, need in pairs:
            before = self.segments[receiver, need.owner]
            after = self.segments[receiver, need.owner] = before + need.nbytes
            self.buffers[receiver] += aligned(after, SEGMENT_ALIGNMENT) - aligned(before, SEGMENT_ALIGNMENT)


def _batches(by_group: Sequence[_Pairs], limit_bytes: int) -> Iterator[PullBatch]:
    """Yield batches of consecutive groups; a group that would overfill a buffer begins the next batch."""
    start, filled = 0, _Filled()
    for group, pairs in enumerate(by_group):
        begun = {receiver for receiver, _ in pairs if filled.buffers[receiver]}
        filled.add(pairs)
        if any(filled.buffers[receiver] > limit_bytes for receiver in begun):
            yield _batch(start, group, by_group)
            start, filled = group, _Filled()
            filled.add(pairs)
    yield _batch(start, len(by_group), by_group)


def _batch(start: int, stop: int, by_group: Sequence[_Pairs]) -> PullBatch:
    """Lay out the parcels. Sizes that larger powers of two divide come first, so that no parcel needs padding."""
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
    return max((each.end_bytes for batch in batches for each in batch.parcels), default=0)


@torch.no_grad()
def exchange(batch: PullBatch, tensors: Mapping[str, torch.Tensor], staging: torch.Tensor) -> int:
    """Send what this rank owns of the batch and receive its parcels; return the bytes sent over the network.

    tensors: the tensors to send, by name. staging: uint8, of at least staging_bytes(batches), on their device; no
    scheduler may still read the previous batch from it. On a GPU the current stream waits for what arrives; the caller
    does not. Only ranks with parcels in the batch take part, so with NCCL a collective call of all ranks must have come
    before.
    """
    rank = dist.get_rank()
    outgoing: dict[int, list[Parcel]] = defaultdict(list)
    incoming: dict[int, list[Parcel]] = defaultdict(list)
    for each in batch.parcels:
        if each.need.owner == rank:
            outgoing[each.receiver].append(each)
        elif each.receiver == rank:
            incoming[each.need.owner].append(each)
    sent = {receiver: _pack(parcels, tensors, staging.device) for receiver, parcels in outgoing.items()}
    operations = [dist.P2POp(dist.isend, sent[peer], peer) for peer in sent]
    for owner, parcels in incoming.items():
        segment = staging[parcels[0].offset_bytes : parcels[-1].end_bytes]
        operations.append(dist.P2POp(dist.irecv, segment, owner))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return sum(message.numel() for message in sent.values())


def _pack(parcels: Sequence[Parcel], tensors: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return one message, uint8: the parcels as they lie in the receiver's staging buffer."""
    first = parcels[0].offset_bytes
    message = torch.empty(parcels[-1].end_bytes - first, dtype=torch.uint8, device=device)
    for each in parcels:
        view, shard = each.need.elements, local(tensors[each.need.elements.of]).contiguous()
        held = shard.as_strided(view.shape, view.stride, shard.storage_offset() + view.offset)
        replace(each, offset_bytes=each.offset_bytes - first).view(message).copy_(held)
    return message
