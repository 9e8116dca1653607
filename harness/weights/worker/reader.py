"""The scheduler's end of the weight stream: opens the slots once, then loads bucket after bucket as they are filled.

Named as a custom weight loader, SGLang calls `stream` in every rank of the engine; the one name it is given says what
to do. What lasts between calls (slots, connection, plan) is kept on the model, as there is no other place that does.
A failure is answered to the trainer rank, not raised: SGLang would end the scheduler.
"""

import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from harness.rollout import scratch
from harness.weights.stream.clock import SegmentTimer
from harness.weights.stream.slots import SLOTS, Layout, Link, PeerGone, SlotEntry, stamp, take, typed
from harness.weights.worker.live_tensors import addresses, derived_tensors, model_tensors
from harness.weights.worker.loader_trace import Copy, Traced, trace
from harness.weights.worker.scheduler_fingerprint import keep_parts

STREAM = "harness.weights.worker.reader.stream"
OPEN, LOAD, READ_BACK, CLOSE = "open", "load", "read_back", "close"
_KEPT = "_harness_weight_stream"


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """What of a slot one copy reads, in elements of the slot's dtype."""

    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    target_dtype: torch.dtype
    index: torch.Tensor | None = None
    """int64 on the CPU, in place of shape, stride and offset, where the elements do not lie in strides."""


@dataclass(kw_only=True, slots=True)
class LoadCoverage:
    """What one scheduler's load_weights makes of a layout."""

    rank: int
    """Engine rank."""
    regions: list[list[Region]] = field(default_factory=list)
    """By bucket."""
    unknown: list[str] = field(default_factory=list)
    """Names that the engine ignores."""
    errors: dict[str, str] = field(default_factory=dict)
    """Name, or names joined by commas -> what the engine's loader raised."""
    opaque: list[str] = field(default_factory=list)
    """Names that arrive by a way that cannot be followed, so cannot be read back."""
    filled: list[str] = field(default_factory=list)
    """The engine's own names of parameters that something in the layout fills, in whole or in part."""
    unfilled: list[str] = field(default_factory=list)
    """Those that nothing fills; none where not all can be told."""
    by_own_loader: int = 0
    """Tensors whose groups SGLang's own loader loads at each sync, since it does more than copy."""


@dataclass(slots=True)
class Plan:
    """How to load one bucket."""

    traced: list[Traced]
    packed: tuple[list[torch.Tensor], list[torch.Tensor]]
    """(targets, sources) of contiguous copies, made in one call."""
    strided: list[Copy]
    own: list[tuple[str, torch.Tensor]]
    """For the model's own load_weights."""

    @property
    def copies(self) -> list[Copy]:
        """All copies, those that the model's own loader makes too."""
        return [copy for traced in self.traced for copy in traced.copies]


@dataclass(slots=True)
class Reader:
    """One scheduler's end of a link."""

    model: Any
    link: Link
    layout: Layout
    device: torch.device
    plans: list[Plan] = field(default_factory=list)
    addresses: dict[str, int] = field(default_factory=dict)
    """Where the model's tensors lay when the plans were made."""

    def make_plans(self) -> None:
        """Ask the model's own loader what it would do with every bucket."""
        self.plans = [self._plan(bucket, self.link.slots[index % SLOTS]) for index, bucket in enumerate(self.layout)]
        aims = [target for plan in self.plans for target in (*plan.packed[0], *(copy.target for copy in plan.strided))]
        aimed_at = {target.untyped_storage().data_ptr() for target in aims}
        self.addresses = {
            name: tensor.data_ptr()
            for name, tensor in model_tensors(self.model).items()
            if tensor.untyped_storage().data_ptr() in aimed_at
        }
        keep_parts(self.model, [plan.copies for plan in self.plans])

    def _plan(self, bucket: Sequence[SlotEntry], slot: torch.Tensor) -> Plan:
        plan = Plan([], ([], []), [], [])
        groups: dict[int, list[SlotEntry]] = {}
        for entry in bucket:
            groups.setdefault(entry.group, []).append(entry)
        for entries in groups.values():
            traced = self._trace(entries, slot)
            plan.traced.append(traced)
            if traced.error or not traced.only_copies or not self._lasting(traced):
                plan.own += [(entry.name, entry.view(slot)) for entry in entries]
                continue
            for copy in traced.copies:
                assert copy.source is not None
                if copy.target.is_contiguous() and copy.source.is_contiguous() and copy.target.dtype == copy.dtype:
                    plan.packed[0].append(copy.target)
                    plan.packed[1].append(copy.source)
                else:
                    plan.strided.append(copy)
        return plan

    def _trace(self, entries: Sequence[SlotEntry], slot: torch.Tensor) -> Traced:
        """trace(), and what no dispatch mode sees: a loader that puts another tensor in a parameter's place."""
        before = [
            (held, name, tensor, tensor.data)
            for module in self.model.modules()
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]
        traced = trace(self.model.load_weights, entries, slot)
        slot_at = slot.untyped_storage().data_ptr()
        for held, name, tensor, data in before:
            now = held.get(name)
            if now is tensor and tensor.data_ptr() == data.data_ptr():
                continue
            if now is not None and now.untyped_storage().data_ptr() == slot_at:
                traced.error = f"it puts the tensor it is given in the place of its {name} instead of copying it"
            held[name], tensor.data = tensor, data
            traced.opaque |= {entry.name for entry in entries}
        return traced

    def _lasting(self, traced: Traced) -> bool:
        """Whether every copy goes into the model itself, not into a tensor that the loader then puts in its place."""
        inside = {tensor.untyped_storage().data_ptr() for tensor in model_tensors(self.model).values()}
        return all(copy.target.untyped_storage().data_ptr() in inside for copy in traced.copies)

    def arrival(self, rank: int) -> LoadCoverage:
        """What the plans mean for whoever sends."""
        found = LoadCoverage(rank=rank)
        filled: set[int] = set()
        for plan in self.plans:
            found.regions.append([_region(copy) for copy in plan.copies])
            found.by_own_loader += len(plan.own)
            for traced in plan.traced:
                names = [entry.name for entry in traced.entries]
                filled |= {copy.target.untyped_storage().data_ptr() for copy in traced.copies}
                if traced.error:
                    found.errors |= self._blame(traced)
                    continue
                found.unknown += [name for name in names if name not in traced.used]
                found.opaque += sorted(traced.opaque)
        for name, parameter in self.model.named_parameters():
            if parameter.untyped_storage().data_ptr() in filled:
                found.filled.append(name)
            elif not found.opaque and not found.errors:
                found.unfilled.append(name)
        return found

    def _blame(self, traced: Traced) -> dict[str, str]:
        """Which entry alone makes the loader raise; all of the group where none does."""
        slot = self.link.slots[0]
        alone = {entry.name: self._trace([entry], slot).error for entry in traced.entries}
        guilty = {name: error for name, error in alone.items() if error}
        return guilty or {", ".join(entry.name for entry in traced.entries): traced.error}

    @torch.no_grad()
    def load(self, first: int) -> dict[str, float]:
        """Load every bucket as the trainer fills it; seconds of waiting and loading.

        first: the stamp of the first bucket; the others count on.
        Raises RuntimeError when a slot was written again before it was read.
        """
        now = addresses(self.model)
        if any(now.get(name) != address for name, address in self.addresses.items()):
            self.make_plans()  # SGLang has put other tensors in the place of those the plans write to
        clock = SegmentTimer(self.device)
        stamps = []
        for index, plan in enumerate(self.plans):
            slot = self.link.slots[index % SLOTS]
            with clock.measure("wait"):
                self._await_filled(index)
            with clock.measure("load"):
                if plan.packed[0]:
                    torch._foreach_copy_(*plan.packed)
                for copy in plan.strided:
                    assert copy.source is not None
                    copy.target.copy_(copy.source)
                if plan.own:
                    self.model.load_weights(plan.own)
            stamps.append(stamp(slot).clone())
            self._say_read(index)
        seconds = clock.read()
        self._check_stamps(stamps, first)
        return seconds

    @torch.no_grad()
    def read_back(self) -> list[str]:
        """Copy what the model holds into the second slot, bucket after bucket; then derive anew what the model derives
        from its weights, and return the names of what was stale."""
        slot = self.link.slots[1]
        for index, plan in enumerate(self.plans):
            assert self.link.receive() == index
            for copy in plan.copies:
                _write_back(copy, slot)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.link.send(index)
        before = {name: tensor.clone() for name, tensor in derived_tensors(self.model).items()}
        for index, plan in enumerate(self.plans):
            for traced in plan.traced:
                if traced.does_more:
                    self._trace(traced.entries, self.link.slots[index % SLOTS])
        after = derived_tensors(self.model)
        return [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]

    def _await_filled(self, index: int) -> None:
        received = self.link.receive()
        if received != index:
            raise PeerGone(f"the trainer sent {received!r} where bucket {index} was due")
        if self.link.filled:
            self.link.filled[index % SLOTS].wait(torch.cuda.current_stream(self.device))

    def _say_read(self, index: int) -> None:
        if self.link.read:
            self.link.read[index % SLOTS].record(torch.cuda.current_stream(self.device))
        self.link.send(index)

    def _check_stamps(self, stamps: Sequence[torch.Tensor], first: int) -> None:
        found = [int(each) - first for each in stamps]
        wrong = [index for index, each in enumerate(found) if each != index]
        if wrong:
            raise RuntimeError(
                f"bucket {wrong[0]} was not in its slot when the engine had read it: it was read too early, or"
                f" overwritten ({found[wrong[0]] - wrong[0]:+d} buckets away)"
            )


def stream(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """What SGLang calls. The first name is JSON: {"do": open | load | read_back | close}, and for open the folder of the
    doors in this host's temp directory, for load the first stamp."""
    asked = json.loads(named_tensors[0][0])
    rank = dist.get_rank()
    reader: Reader | None = getattr(model, _KEPT, None)
    try:
        if asked["do"] == OPEN:
            device = next(model.parameters()).device
            link, layout = take(scratch.shared() / asked["folder"], rank, device)
            reader = Reader(model, link, layout, device)
            setattr(model, _KEPT, reader)
            reader.make_plans()
            link.send(("arrival", reader.arrival(rank)))
        elif asked["do"] == CLOSE:
            if reader is not None:
                delattr(model, _KEPT)
                reader.link.close()
        else:
            assert reader is not None, "the weight stream of this scheduler was never opened"
            done = reader.load(asked["first"]) if asked["do"] == LOAD else reader.read_back()
            reader.link.send(("done", done))
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        if reader is not None and not isinstance(error, PeerGone):
            reader.link.send(("failed", f"{type(error).__name__}: {error}"))


def _region(copy: Copy) -> Region:
    source = copy.source
    return Region(
        names=copy.names,
        dtype=copy.dtype,
        shape=tuple(copy.target.shape),
        stride=tuple(source.stride()) if source is not None else (),
        offset=int(source.storage_offset()) if source is not None else 0,
        target_dtype=copy.target.dtype,
        index=copy.index.cpu() if copy.index is not None else None,
    )


def _write_back(copy: Copy, slot: torch.Tensor) -> None:
    """The copy backwards, into `slot`, whichever slot it was planned for."""
    elements = typed(slot, copy.dtype)
    if copy.index is not None:
        elements[copy.index] = copy.target.to(copy.dtype)
        return
    assert copy.source is not None
    place, held = copy.source, copy.target
    for axis, stride in enumerate(place.stride()):
        if stride == 0:  # one element for many: any of them
            place, held = (
                place.narrow(axis, 0, min(1, place.shape[axis])),
                held.narrow(axis, 0, min(1, held.shape[axis])),
            )
    elements.as_strided(place.shape, place.stride(), place.storage_offset()).copy_(held)
