"""The scheduler's end of a pull: plans once, then copies its shards out of the trainers' memory again and again.

The functions at the end are what a trainer rank asks the scheduler next to it (rollout/schedulers.py). What lasts
between them is kept on the model, because nothing else of ours lives as long as the scheduler does.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from harness.rollout.schedulers import refuse_update
from harness.weights.fusing import FusingGroup
from harness.weights.pull.copies import Copies, copies_of
from harness.weights.pull.exchange import Need, Parcel, PullBatch, packed
from harness.weights.pull.shards import OpenShards, RankShards
from harness.weights.pull.tiles import Move
from harness.weights.regions import Cut, Region, regions
from harness.weights.traced.loader_trace import GroupTrace
from harness.weights.traced.rank_trace import LoaderTrace
from harness.weights.worker import kept_trace

STAGING = "staging"
"""The name under which a trainer rank's staging buffer is exported."""
_KEPT = "_harness_puller"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Where a scheduler finds the elements of the trainer's tensors."""

    groups: tuple[FusingGroup, ...] | None
    """All tensors that are sent; None: those of the last plan."""
    cuts: dict[str, tuple[Cut, ...]]
    """Tensor name -> which trainer rank holds which elements."""
    shards: tuple[RankShards, ...]
    """The memory of the trainer ranks that this process can open."""
    transport: str
    """Which PullTransport asks: a scheduler has one plan, so it serves one of them at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deliveries:
    """What is brought to this host from others, and in which order everything is pulled."""

    batches: tuple[PullBatch, ...]
    staging: tuple[RankShards, ...] = ()
    """The staging buffers of this host's ranks, if anything is brought."""


@dataclass(frozen=True, slots=True)
class Read:
    """Elements that a group needs, and the tensor that they go to."""

    region: Region
    of: str
    """The trainer's tensor."""
    dtype: torch.dtype
    """As it is sent."""
    target: torch.Tensor


@dataclass(slots=True)
class Puller:
    """One scheduler's plan, and what it needs to carry it out."""

    model: Any
    trace: LoaderTrace
    sources: Sources
    shards: OpenShards
    """The memory of the trainers of this host."""
    own: set[int] = field(default_factory=set)
    """Numbers of groups for the model's own load_weights, which does more than copy."""
    staging: OpenShards = field(default_factory=OpenShards)
    batches: tuple[PullBatch, ...] = ()
    parcels: dict[Need, Parcel] = field(default_factory=dict)
    """What this host receives -> where it lies in a staging buffer."""
    copies: list[Copies] = field(default_factory=list)
    """The copies of each batch."""
    zeros: list[list[torch.Tensor]] = field(default_factory=list)
    """For each batch, what is set to zero before its copies."""
    planned: list[GroupTrace] | None = None
    """The traces that the copies follow. A later trace, by whoever asked for it, makes the copies stale."""
    done: int = 0
    """The number of the last batch pulled, counted over all pulls."""

    def close(self) -> None:
        """Close all memory of others; the copies that were planned on it go too."""
        self.copies = []
        self.shards.close()
        self.staging.close()

    def needs(self) -> tuple[Need, ...]:
        """Return what is in no memory that this process has opened."""
        reads = ((number, read) for number in range(len(self.trace.groups)) for read in self._reads(number))
        found = {
            Need.of(read.region, read.of, number, read.dtype): None
            for number, read in reads
            if read.region.owner not in self.shards.places
        }
        return tuple(found)

    def bytes_read(self) -> dict[int, int]:
        """Return trainer rank -> bytes that one pull reads of its memory. Elements from other hosts are not counted."""
        found = Counter[int]()
        for number in range(len(self.trace.groups)):
            for read in self._reads(number):
                if read.region.owner in self.shards.places:
                    _, held = self.shards.find(read.region.owner, read.of)
                    found[read.region.owner] += held.itemsize * prod(size for size, _, _ in read.region.axes)
        return dict(found)

    def prepare(self, deliveries: Deliveries) -> None:
        """Make all copies ready, batch by batch."""
        self.batches, self.staging = deliveries.batches, OpenShards(deliveries.staging)
        brought = (parcel for batch in deliveries.batches for parcel in batch.parcels)
        self.parcels = {each.need: each for each in brought if each.receiver in self.staging.places}
        self.make_copies()

    def make_copies(self) -> None:
        """Make ready what fills the model in each batch, except for the groups that its own loader loads."""
        self.zeros, self.copies, self.planned = [], [], self.trace.traces
        for batch in self.batches:
            numbers = [number for number in range(batch.start, batch.stop) if number not in self.own]
            self.zeros.append([zeros for number in numbers for zeros in self.trace.traces[number].zeros])
            moves = [self._move(number, read) for number in numbers for read in self._reads(number)]
            self.copies.append(copies_of(moves, self.trace.device))

    def _move(self, number: int, read: Read) -> Move:
        """Return where a read finds its elements: in a trainer's shard, or in a parcel that was brought."""
        region, target = read.region, read.target
        into = target.data_ptr() + region.target * target.element_size()
        if region.owner in self.shards.places:
            address, held = self.shards.find(region.owner, read.of)
            return Move(region, address + region.source * held.itemsize, into, held, read.dtype, target.dtype)
        parcel = self.parcels[Need.of(region, read.of, number, read.dtype)]
        address, _ = self.staging.find(parcel.receiver, STAGING)
        return Move(packed(region), address + parcel.offset_bytes, into, read.dtype, read.dtype, target.dtype)

    def _reads(self, number: int, whole: Mapping[str, torch.Tensor] | None = None) -> Iterator[Read]:
        """Yield what is read for a group.

        For a group that the model's own loader loads, that is all elements of each of its tensors, into `whole`. None:
        into meta tensors, to know what is needed.
        """
        group = self.trace.groups[number]
        if number in self.own:
            for of, tensor in (whole or group.empty_tensors("meta")).items():
                for region in regions(0, tensor.shape, (1,), (1,), self.sources.cuts[of]):
                    yield Read(region, of, tensor.dtype, tensor)
            return
        for copy in self.trace.traces[number].copies:
            source = copy.source
            cuts = self.sources.cuts[source.of]
            for region in regions(source.offset, source.shape, source.stride, copy.target.stride(), cuts):
                yield Read(region, source.of, source.dtype, copy.target)

    def _load(self, number: int) -> None:
        """Give the whole tensors of a group, filled from the shards, to the model's own loader."""
        group, device = self.trace.groups[number], self.trace.device
        whole = group.empty_tensors(device)
        copies_of([self._move(number, read) for read in self._reads(number, whole)], device).run()
        with self.trace.post_load_noted():  # done once, after the last batch: some models scale in place there
            self.model.load_weights([(view.name, view.in_memory(whole[view.of])) for view in group.views])

    @torch.no_grad()
    def pull(self, number: int, index: int) -> None:
        """Pull one batch; a GPU may still be at it on return.

        number: counted over the batches of all pulls. Raise RuntimeError for one out of turn.
        """
        if number != self.done + 1:
            raise RuntimeError(f"the number of a pull must be {self.done + 1}, as {self.done} are done, got {number}")
        self.trace.refresh()
        if self.trace.traces is not self.planned:
            self.own = self.trace.groups_to_load()
            self.make_copies()
        if self.zeros[index]:
            torch._foreach_zero_(self.zeros[index])
        self.copies[index].run()
        batch = self.batches[index]
        for group in sorted(self.own.intersection(range(batch.start, batch.stop))):
            self._load(group)
        if self.trace.derives and index == len(self.batches) - 1:
            self.model.post_load_weights()
        self.done = number


def kept(model: Any) -> Puller:
    """Return the plan of the scheduler whose model this is, as `plan` made it."""
    found = getattr(model, _KEPT, None)
    assert isinstance(found, Puller), "this scheduler has never planned a pull"
    return found


def _kept_for(model: Any, transport: str) -> Puller:
    """Return the plan. Raise RuntimeError if another transport has planned since: that plan reads other memory."""
    found = kept(model)
    if found.sources.transport != transport:
        raise RuntimeError(
            "another WeightSync has synced this engine in the meantime; use one WeightSync for each engine, or close() one"
            " before the next begins"
        )
    return found


def plan(model: Any, sources: Sources) -> tuple[Need, ...]:
    """Open the memory of the trainers of this host; return what must be brought from others.

    Raise RuntimeError, naming the rank, for memory that cannot be opened, and where SGLang refuses updates.
    """
    refuse_update(model)
    before: Puller | None = getattr(model, _KEPT, None)
    if before:
        before.close()
    if sources.groups is not None:
        trace = kept_trace.trace_of(model, sources.groups)
    else:
        trace = _kept_for(model, sources.transport).trace
        trace.refresh()
    puller = Puller(model, trace, sources, OpenShards(sources.shards), trace.groups_to_load())
    setattr(model, _KEPT, puller)
    return puller.needs()


def prepare(model: Any, request: tuple[str, Deliveries]) -> None:
    """Make the copies of a transport's plan ready."""
    transport, deliveries = request
    _kept_for(model, transport).prepare(deliveries)


def bytes_read(model: Any, transport: str) -> dict[int, int]:
    """Return trainer rank -> bytes that a pull of this transport's plan reads of its memory."""
    return _kept_for(model, transport).bytes_read()


def pull(model: Any, request: tuple[str, int, int]) -> None:
    """Pull one batch of a transport's plan; see Puller.pull."""
    transport, *numbers = request
    _kept_for(model, transport).pull(*numbers)


def release(model: Any, transport: str) -> None:
    """Close the trainers' memory: it cannot be given back to the GPU while it is open. No-op if another has planned."""
    found = getattr(model, _KEPT, None)
    if found is not None and found.sources.transport == transport:
        found.close()
