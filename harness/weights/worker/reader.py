"""The scheduler's end of the slots: opens them once, then loads bucket after bucket as they are filled.

`stream` runs in every scheduler of an engine; what lasts between calls (slots, connection, plans) is kept on the model. A
failure is answered to the trainer rank, not raised: SGLang would end the scheduler.
"""

import json
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from harness.rollout.engine_errors import PeerGone
from harness.runtime import scratch
from harness.weights.stream.slots import (
    SLOTS,
    Layout,
    Region,
    SegmentTimer,
    SlotConnection,
    SlotEntry,
    connect_slots,
    stamp,
)
from harness.weights.worker.loader_trace import Copy, GroupTrace, trace_loader
from harness.weights.worker.model_state import (
    INTEGER,
    Call,
    derived_tensors,
    keep_copies,
    kept_copies,
    model_tensors,
    storage,
)

STREAM = f"{__name__}.stream"
OPEN, LOAD, COMPARE, CLOSE = "open", "load", "compare", "close"
_KEPT = "_harness_weight_stream"


@dataclass(kw_only=True, slots=True)
class LoadCoverage:
    """What the load_weights of one scheduler, of engine rank `rank`, makes of a layout."""

    rank: int
    regions: list[list[Region]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    """Name, or names joined by commas -> what the loader raised."""
    opaque: list[str] = field(default_factory=list)
    """Names that arrive in a way that cannot be followed, so cannot be compared."""
    filled: dict[str, list[str]] = field(default_factory=dict)
    """The engine's own names of tensors -> names that fill them, in whole or in part."""
    unfilled: list[str] = field(default_factory=list)
    """Parameters that nothing fills; empty where that cannot be known of all."""


@dataclass(slots=True)
class LoadPlan:
    """How to load one bucket."""

    traces: list[GroupTrace] = field(default_factory=list)
    copied: dict[bool, tuple[list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=dict)
    """(targets, sources) of copies that one kernel makes (True), and of those that are strided or convert."""
    own: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """For the model's own load_weights, since it does more than copy."""

    @property
    def copies(self) -> list[Copy]:
        """All copies, those that the model's own loader makes too."""
        return [copy for traced in self.traces for copy in traced.copies]

    def load(self, model: Any) -> None:
        for targets, sources in self.copied.values():
            torch._foreach_copy_(targets, sources)
        if self.own:
            model.load_weights(self.own)


@dataclass(slots=True)
class SlotReader:
    """One scheduler's end of a link."""

    model: Any
    link: SlotConnection
    layout: Layout
    device: torch.device
    plans: list[LoadPlan] = field(default_factory=list)

    def make_plans(self) -> None:
        """Ask the model's own loader what it would do with every bucket."""
        self.plans = [self._plan(bucket, self.link.slots[index % SLOTS]) for index, bucket in enumerate(self.layout)]
        keep_copies(self.model, [plan.copies for plan in self.plans])

    def _plan(self, bucket: Sequence[SlotEntry], slot: torch.Tensor) -> LoadPlan:
        plan = LoadPlan()
        groups: dict[int, list[SlotEntry]] = {}
        for entry in bucket:
            groups.setdefault(entry.group, []).append(entry)
        for entries in groups.values():
            traced = self._trace(entries, slot)
            plan.traces.append(traced)
            # A copy into a tensor that the loader then puts into the model does not last.
            inside = {storage(tensor) for tensor in model_tensors(self.model).values()}
            if not traced.only_copies or any(storage(copy.target) not in inside for copy in traced.copies):
                plan.own += [(entry.name, entry.view(slot)) for entry in entries]
                continue
            for copy in traced.copies:
                target, source = copy.target, copy.region.view(slot)
                fast = target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype
                targets, sources = plan.copied.setdefault(fast, ([], []))
                targets.append(target)
                sources.append(source)
        return plan

    def _trace(self, entries: Sequence[SlotEntry], slot: torch.Tensor) -> GroupTrace:
        """trace_loader(), and what no dispatch mode sees: a loader that replaces a parameter by another tensor."""
        members = [each for module in self.model.modules() for each in (module._parameters, module._buffers)]
        before = [(each, name, held, held.data) for each in members for name, held in each.items() if held is not None]
        traced = trace_loader(self.model.load_weights, entries, slot)
        for each, name, tensor, data in before:
            now = each.get(name)
            if now is tensor and tensor.data_ptr() == data.data_ptr():
                continue
            if now is not None and storage(now) == storage(slot):
                traced.error = f"it puts the tensor it is given in the place of its {name} instead of copying it"
            each[name], tensor.data = tensor, data
            traced.opaque |= {entry.name for entry in entries}
        return traced

    def coverage(self, rank: int) -> LoadCoverage:
        """Return what the plans mean for the sender."""
        found = LoadCoverage(rank=rank, regions=[[copy.region for copy in plan.copies] for plan in self.plans])
        filled_by: dict[int, dict[str, None]] = {}
        for plan in self.plans:
            for copy in plan.copies:
                filled_by.setdefault(storage(copy.target), {})[copy.region.name] = None
            for traced in plan.traces:
                if traced.error:
                    found.errors |= self._blame(traced)
                    continue
                found.unknown += [entry.name for entry in traced.entries if entry.name not in traced.used]
                found.opaque += sorted(traced.opaque)
        named = model_tensors(self.model).items()
        found.filled = {name: list(filled_by[storage(each)]) for name, each in named if storage(each) in filled_by}
        if not found.opaque and not found.errors:
            found.unfilled = [name for name, _ in self.model.named_parameters() if name not in found.filled]
        return found

    def _blame(self, traced: GroupTrace) -> dict[str, str]:
        """Return the entries that alone make the loader raise; the whole group where none does."""
        alone = {entry.name: self._trace([entry], self.link.slots[0]).error for entry in traced.entries}
        guilty = {name: error for name, error in alone.items() if error}
        return guilty or {", ".join(alone): traced.error}

    @torch.no_grad()
    def load(self, first: int) -> dict[str, float]:
        """Load every bucket as the trainer fills it; return the seconds of waiting and loading.

        first: the stamp of the first bucket. Raise RuntimeError when a slot was written again before it was read.
        """
        return self._read_each(first, lambda plan, slot: plan.load(self.model))

    @torch.no_grad()
    def compare(self, first: int) -> tuple[dict[str, tuple[int, int]], list[str]]:
        """Compare what the model holds, in its own dtype, with every bucket as the trainer fills it; raise as `load` does.

        Return name -> (elements that differ in any bit, all of its copies), and the names of derived tensors that are
        stale; these are derived anew.
        """
        derived = {name: tensor.clone() for name, tensor in derived_tensors(self.model).items()}
        counts: list[tuple[Copy, torch.Tensor]] = []

        def count(plan: LoadPlan, slot: torch.Tensor) -> None:
            for copy in plan.copies:
                integer = INTEGER[copy.target.element_size()]
                expected = copy.region.view(slot).to(copy.target.dtype)
                counts.append((copy, (expected.view(integer) != copy.target.view(integer)).sum()))

        self._read_each(first, count)
        wrong: dict[str, tuple[int, int]] = {}
        for copy, differing in counts:
            if differing:
                before = wrong.get(copy.region.name, (0, 0))
                wrong[copy.region.name] = before[0] + int(differing), before[1] + copy.target.numel()
        for index, plan in enumerate(self.plans):
            for traced in plan.traces:
                if traced.does_more:
                    self._trace(traced.entries, self.link.slots[index % SLOTS])
        after = derived_tensors(self.model)
        return wrong, [name for name, tensor in derived.items() if not torch.equal(tensor, after[name])]

    def _read_each(self, first: int, work: Callable[[LoadPlan, torch.Tensor], None]) -> dict[str, float]:
        if kept_copies(self.model) is None:
            self.make_plans()
        timer, stamps = SegmentTimer(self.device), []
        for index, plan in enumerate(self.plans):
            slot = self.link.slots[index % SLOTS]
            with timer.measure("wait"):
                self._await_filled(index)
            with timer.measure("load"):
                work(plan, slot)
            stamps.append(stamp(slot).clone())
            self._say_read(index)
        for index, found in enumerate(stamps):
            if (apart := int(found) - first - index) != 0:
                raise RuntimeError(
                    f"bucket {index} was not in its slot when the engine had read it: it was read too early, or"
                    f" overwritten ({apart:+d} buckets away)"
                )
        return timer.read()

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


def stream(model: Any, call: Call) -> None:
    """Do what the text of the call says: JSON with do = open (and the listeners' folder) | load | compare | close."""
    request = json.loads(call[0][0])
    rank = dist.get_rank()
    reader: SlotReader | None = getattr(model, _KEPT, None)
    try:
        if request["do"] == OPEN:
            device = next(model.parameters()).device
            link, layout = connect_slots(scratch.shared() / request["folder"], rank, device)
            reader = SlotReader(model, link, layout, device)
            setattr(model, _KEPT, reader)
            reader.make_plans()
            link.send(("coverage", reader.coverage(rank)))
        elif request["do"] == CLOSE:
            if reader is not None:
                delattr(model, _KEPT)
                reader.link.close()
        else:
            assert reader is not None, "the weight stream of this scheduler was never opened"
            work = reader.load if request["do"] == LOAD else reader.compare
            reader.link.send(("done", work(request["first"])))
    except Exception as error:
        traceback.print_exc()
        if reader is not None and not isinstance(error, PeerGone):
            reader.link.send(("failed", f"{type(error).__name__}: {error}"))
