"""The scheduler's end of a pull: traces its loader once, then copies its shards out of the trainers' memory.

The functions are what a trainer rank asks the scheduler beside it (rollout/schedulers.py); what lasts between them is kept
on the model, as there is no other place.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from harness.weights.groups import FusingGroup, LiveSpan, SourceView
from harness.weights.pull.copies import Copies, copies_of
from harness.weights.pull.exchange import Need, Parcel, PullBatch, packed
from harness.weights.pull.regions import Cut, Region, regions
from harness.weights.pull.shards import OpenShards, RankShards
from harness.weights.pull.tiles import Move
from harness.weights.worker.loader_trace import GroupTrace, storage, trace_loader
from harness.weights.worker.model_state import (
    fingerprint,
    model_tensors,
)

STAGING = "staging"
"""The name under which a trainer rank's staging buffer is exported."""
_KEPT = "_harness_puller"


@dataclass(kw_only=True, slots=True)
class LoadCoverage:
    """What the load_weights of one scheduler, of engine rank `rank`, makes of the groups."""

    rank: int
    sources: list[list[SourceView]] = field(default_factory=list)
    """What the copies of each group read."""
    unknown: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    """Name, or names joined by commas -> what the loader raised."""
    opaque: list[str] = field(default_factory=list)
    """Names that arrive in a way that cannot be followed, so cannot be compared."""
    filled: dict[str, list[str]] = field(default_factory=dict)
    """The engine's own names of tensors -> names that fill them, in whole or in part."""
    unfilled: list[str] = field(default_factory=list)
    """Parameters that nothing fills; empty where that cannot be known of all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Where a scheduler finds the elements of the live tensors."""

    cuts: dict[str, tuple[Cut, ...]]
    """By live name."""
    shards: tuple[RankShards, ...]
    """Of the ranks whose memory this process can open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deliveries:
    """What is brought to this host from elsewhere, and in which order all of it is pulled."""

    batches: tuple[PullBatch, ...]
    staging: tuple[RankShards, ...] = ()
    """The buffers of this host's ranks, if anything is brought."""


@dataclass(slots=True)
class Puller:
    """One scheduler's plan, and what it needs to carry it out."""

    model: Any
    groups: tuple[FusingGroup, ...]
    traces: list[GroupTrace] = field(default_factory=list)
    filled: list[tuple[dict[str, Any], str, int]] = field(default_factory=list)
    """What the copies fill: a module's parameters, buffers or attributes, the name in there, the tensor's address."""
    own: set[int] = field(default_factory=set)
    """Numbers of groups for the model's own load_weights, which does more than copy."""
    derives: bool = False
    """The loader ends with post_load_weights, which derives tensors from what was copied."""
    sources: Sources | None = None
    shards: OpenShards = field(default_factory=OpenShards)
    staging: OpenShards = field(default_factory=OpenShards)
    deliveries: Deliveries = field(default_factory=lambda: Deliveries(batches=()))
    parcels: dict[Need, Parcel] = field(default_factory=dict)
    copies: list[Copies] = field(default_factory=list)
    """Of each batch."""
    zeros: list[list[torch.Tensor]] = field(default_factory=list)
    """Of each batch: what is set to zero before its copies."""
    done: int = 0
    """The number of the last batch pulled, counted over all pulls."""

    @property
    def device(self) -> torch.device:
        return torch.device(next(self.model.parameters()).device)

    def trace(self) -> None:
        """Ask the model's own loader what it would do with every group."""
        self.derives = False
        self.traces = [self.trace_group(group) for group in self.groups]
        targets = {storage(copy.target) for traced in self.traces for copy in traced.copies}
        modules = list(self.model.modules())
        members = [each for module in modules for each in (module._parameters, module._buffers, vars(module))]
        self.filled = [
            (each, name, value.data_ptr())
            for each in members
            for name, value in each.items()
            if isinstance(value, torch.Tensor) and storage(value) in targets
        ]
        inside = {storage(tensor) for tensor in model_tensors(self.model).values()}
        self.own = {
            number
            for number, traced in enumerate(self.traces)
            # A copy into a tensor that the loader then puts into the model does not last.
            if not traced.only_copies or any(storage(copy.target) not in inside for copy in traced.copies)
        }

    @property
    def is_current(self) -> bool:
        """Whether the tensors that the copies fill are in their places, where SGLang may put others.

        Asked before each pull, so it looks at those tensors alone.
        """
        found = ((each.get(name), address) for each, name, address in self.filled)
        return all(tensor is not None and tensor.data_ptr() == address for tensor, address in found)

    def trace_group(self, group: FusingGroup) -> GroupTrace:
        """trace_loader(), and what no dispatch mode sees: a loader that replaces a parameter by another tensor.

        The memory is the CPU's, as where SGLang loads from disk, and is never touched: no page of it exists. Where the
        loader ends with SGLang's own post-load step, that is noted, not run.
        """
        memory = torch.empty(group.nbytes, dtype=torch.uint8)
        members = [each for module in self.model.modules() for each in (module._parameters, module._buffers)]
        before = [(each, name, held, held.data) for each in members for name, held in each.items() if held is not None]
        with self._post_load_noted():
            traced = trace_loader(self.model.load_weights, group.entries, memory)
        for each, name, tensor, data in before:
            now = each.get(name)
            if now is tensor and tensor.data_ptr() == data.data_ptr():
                continue
            if now is not None and storage(now) == storage(memory):
                traced.error = f"it puts the tensor it is given in the place of its {name} instead of copying it"
            each[name], tensor.data = tensor, data
            traced.opaque |= {entry.name for entry in group.entries}
        return traced

    def _post_load_noted(self) -> Any:
        def note(*_: object, **__: object) -> None:
            self.derives = True

        has_it = hasattr(self.model, "post_load_weights")
        return patch.object(self.model, "post_load_weights", note) if has_it else nullcontext()

    def open(self, sources: Sources) -> None:
        """Open the memory of the trainers that can be opened. Raise RuntimeError, naming the rank, where that fails."""
        self.close()
        self.sources, self.shards = sources, OpenShards(sources.shards)

    def close(self) -> None:
        """Close all memory of others; what was planned on it goes too."""
        self.copies = []
        self.shards.close()
        self.staging.close()

    def needs(self) -> tuple[Need, ...]:
        """Return what is in no memory that this process has opened."""
        found = dict.fromkeys(
            Need.of(region, span.live_name, number, span.dtype)
            for number in range(len(self.groups))
            for region, span, _ in self._reads(number)
            if region.owner not in self.shards.places
        )
        return tuple(found)

    def prepare(self, deliveries: Deliveries) -> None:
        """Make ready all copies, batch by batch."""
        self.deliveries, self.staging = deliveries, OpenShards(deliveries.staging)
        brought = (parcel for batch in deliveries.batches for parcel in batch.parcels)
        self.parcels = {each.need: each for each in brought if each.receiver in self.staging.places}
        self.make_copies()

    def make_copies(self) -> None:
        """Make ready what fills the model in each batch, but for what its own loader does."""
        self.zeros, self.copies = [], []
        for batch in self.deliveries.batches:
            numbers = [number for number in range(batch.start, batch.stop) if number not in self.own]
            self.zeros.append([zeros for number in numbers for zeros in self.traces[number].zeros])
            self.copies.append(copies_of([move for number in numbers for move in self.moves(number)], self.device))

    def moves(self, number: int, targets: Sequence[torch.Tensor] = ()) -> Iterator[Move]:
        """Yield what fills the tensors of a group: those of its copies, or others of the same shapes."""
        for region, span, copy in self._reads(number):
            target = targets[copy] if targets else self.traces[number].copies[copy].target
            into = target.data_ptr() + region.target * target.element_size()
            if region.owner in self.shards.places:
                address, held = self.shards.find(region.owner, span.live_name)
                yield Move(region, address + region.source * held.itemsize, into, held, span.dtype, target.dtype)
                continue
            parcel = self.parcels[Need.of(region, span.live_name, number, span.dtype)]
            address, _ = self.staging.find(parcel.receiver, STAGING)
            yield Move(packed(region), address + parcel.offset, into, span.dtype, span.dtype, target.dtype)

    def _reads(self, number: int) -> Iterator[tuple[Region, LiveSpan, int]]:
        """Yield what is read for a group, of which live tensor, and for which of its copies.

        For the model's own loader: all elements of each of its live tensors, in place of copies.
        """
        assert self.sources is not None
        group = self.groups[number]
        if number in self.own:
            for place, span in enumerate(group.spans):
                for region in regions(0, (span.numel,), (1,), (1,), self.sources.cuts[span.live_name]):
                    yield region, span, place
            return
        for place, copy in enumerate(self.traces[number].copies):
            source = copy.source
            offset = source.offset * source.dtype.itemsize
            span = group.span_of(offset)
            first = (offset - span.offset) // source.dtype.itemsize
            cuts = self.sources.cuts[span.live_name]
            for region in regions(first, source.shape, source.stride, copy.target.stride(), cuts):
                yield region, span, place

    def whole(self, number: int) -> torch.Tensor:
        """Return the memory of a group for the model's own loader, uint8 [nbytes], filled from the shards."""
        group = self.groups[number]
        filled = torch.empty(group.nbytes, dtype=torch.uint8, device=self.device)
        parts = [filled[each.offset :][: each.numel * each.dtype.itemsize].view(each.dtype) for each in group.spans]
        copies_of(list(self.moves(number, parts)), self.device).run()
        return filled

    @torch.no_grad()
    def load(self, number: int, batch: int) -> None:
        """Pull one batch; a GPU may still be at it on return.

        number: counted over the batches of all pulls. Raise RuntimeError for one out of turn.
        """
        if number != self.done + 1:
            raise RuntimeError(f"the number of a pull must be {self.done + 1}, as {self.done} are done, got {number}")
        if not self.is_current:
            self.trace()
            self.make_copies()
        if self.zeros[batch]:
            torch._foreach_zero_(self.zeros[batch])
        self.copies[batch].run()
        each = self.deliveries.batches[batch]
        for group in sorted(self.own.intersection(range(each.start, each.stop))):
            filled = self.whole(group)
            self.model.load_weights([(entry.name, entry.view(filled)) for entry in self.groups[group].entries])
        if self.derives and each is self.deliveries.batches[-1]:
            self.model.post_load_weights()
        self.done = number

    def coverage(self) -> LoadCoverage:
        """Return what the traces mean for the sender."""
        found = LoadCoverage(rank=dist.get_rank())
        filled_by: dict[int, dict[str, None]] = {}
        for group, traced in zip(self.groups, self.traces, strict=True):
            found.sources.append([copy.source for copy in traced.copies])
            for copy in traced.copies:
                filled_by.setdefault(storage(copy.target), {})[copy.source.name] = None
            if traced.error:
                found.errors |= self._blame(group, traced)
                continue
            found.unknown += [entry.name for entry in traced.entries if entry.name not in traced.used]
            found.opaque += sorted(traced.opaque)
        for name, tensor in model_tensors(self.model).items():
            if names := filled_by.get(storage(tensor)):
                found.filled[name] = list(names)
        if not found.opaque and not found.errors:
            found.unfilled = [name for name, _ in self.model.named_parameters() if name not in found.filled]
        return found

    def _blame(self, group: FusingGroup, traced: GroupTrace) -> dict[str, str]:
        """Return the entries that alone make the loader raise; the whole group where none does."""
        alone = {entry.name: self.trace_group(replace(group, entries=(entry,))).error for entry in group.entries}
        guilty = {name: error for name, error in alone.items() if error}
        return guilty or {", ".join(alone): traced.error}


def kept(model: Any) -> Puller:
    """Return the plan of the scheduler whose model this is, as `trace` made it."""
    found = getattr(model, _KEPT, None)
    assert isinstance(found, Puller), "this scheduler has never traced its loader"
    return found


def trace(model: Any, groups: tuple[FusingGroup, ...]) -> LoadCoverage:
    """Trace the loader of this scheduler's model, now and for all that follows."""
    if hasattr(model, _KEPT):
        kept(model).close()
    puller = Puller(model, groups)
    puller.trace()
    setattr(model, _KEPT, puller)
    return puller.coverage()


@torch.no_grad()
def fingerprints(model: Any, _: None = None) -> dict[str, int]:
    """Return the fingerprint of what each copy filled as "<group>/<copy>" -> number; empty where another trace is due."""
    puller = getattr(model, _KEPT, None)
    traces = puller.traces if puller and puller.is_current else ()
    sums = {
        f"{number}/{part}": fingerprint(copy)
        for number, traced in enumerate(traces)
        for part, copy in enumerate(traced.copies)
    }
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}


def plan(model: Any, sources: Sources) -> tuple[Need, ...]:
    """Open the memory of the trainers of this host; return what must be brought from elsewhere."""
    kept(model).open(sources)
    return kept(model).needs()


def prepare(model: Any, deliveries: Deliveries) -> None:
    kept(model).prepare(deliveries)


def pull(model: Any, numbers: tuple[int, int]) -> None:
    """Do one batch of one pull; see Puller.load."""
    kept(model).load(*numbers)


def release(model: Any, _: None) -> None:
    """Close the trainers' memory, which cannot be given back to the GPU while it is open."""
    kept(model).close()
