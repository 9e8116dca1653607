"""One rank's trace of its own loader: where every tensor that is sent goes, and what that leaves out.

The rank's model may be a scheduler's, or one on the meta device: the answer is the same. It is the one model of "what
must this rank hold" that fingerprints, coverage, poison, a pull, launch/full_size.py and launch/verify.py share.
"""

import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from harness.rollout.served_models import models_in
from harness.weights.fusing import FusingGroup
from harness.weights.tensor_view import TensorView, span, without_numbers
from harness.weights.traced.coverage import LoadCoverage, LoaderCopy, excuse
from harness.weights.traced.loader_trace import Copy, GroupTrace, trace_loader, written_twice
from harness.weights.traced.model_state import DERIVED, derived_tensors, model_tensors, sent_parameters
from harness.weights.traced.undo import UndoneWrites, address, storage
from harness.weights.zero_padding import ModelSizes

CALL_BYTES = 1 << 36
"""How much is given to one call of a loader. The memory is never touched, but must be a range of addresses."""


@dataclass(slots=True)
class LoaderTrace:
    """The traces of all groups on one scheduler's model."""

    model: Any
    groups: tuple[FusingGroup, ...]
    traces: list[GroupTrace] = field(default_factory=list)
    padding: list[list[torch.Tensor]] = field(default_factory=list)
    """For each group, what its load makes zero and leaves so."""
    derives: bool = False
    """The loader ends with post_load_weights, which derives tensors from what was copied."""
    derived_over: set[str] = field(default_factory=set)
    """Checkpoint names whose copies post_load_weights changes in place."""
    without_refused: list[GroupTrace] = field(default_factory=list)
    """The traces once more, where the loader refused a tensor: of the others. Made by coverage()."""
    aimed: dict[str, torch.Tensor] = field(default_factory=dict)
    """Checkpoint name that the loader refuses alone -> what it was about to fill, where that is seen."""
    only_once: str = ""
    """Why the loader cannot load a second time after it has loaded once; "" if it can."""
    derived_bytes: int = 0
    """Bytes of the tensors that post_load_weights makes, such as MLA's w_kc and w_vc, beside the parameters."""
    derived: set[str] = field(default_factory=set)
    """The engine's names of tensors that the loader, or post_load_weights, makes of what was copied."""
    _filled: list[tuple[str, torch.Tensor]] | None = None
    _places: tuple[Sequence[Any], ...] = ((), (), ())
    """What the copies fill: dicts of a module's parameters, buffers or attributes; the names in there; the tensors'
    addresses."""
    _parameters: frozenset[int] = frozenset()
    """Where every parameter lies, also those that no copy fills."""

    @property
    def device(self) -> torch.device:
        return torch.device(next(self.model.parameters()).device)

    def run(self) -> None:
        """Ask the model's own loader what it would do with every group."""
        self.derives, self.derived_over, self.derived_bytes, self.only_once = False, set(), 0, ""
        self.derived, self._filled, self.aimed = set(), None, {}
        self.traces = self._trace_all(UndoneWrites(self.model))
        if self.derives:
            self._find_what_is_derived_over()
        self.padding = [traced.find_padding() for traced in self.traces]
        targets = {storage(copy.target) for copy in self.copies()}
        modules = list(self.model.modules())
        members = [each for module in modules for each in (module._parameters, module._buffers, vars(module))]
        found = [
            (each, name, address(value))
            for each in members
            for name, value in each.items()
            if isinstance(value, torch.Tensor) and storage(value) in targets
        ]
        self._places = tuple(zip(*found, strict=True)) or ((), (), ())
        self._parameters = parameter_addresses(self.model)

    def _trace_all(self, undone: UndoneWrites) -> list[GroupTrace]:
        """Trace one group of each kind alone, the others together, and those alone that are then unlike the first."""
        alike, found = KindsOfGroups(self.groups), dict[int, GroupTrace]()

        def trace_alone(number: int) -> None:
            found[number] = self.trace_group(self.groups[number], undone)
            alike.saw_alone(number, found[number])

        for number in alike.first_of_each_kind():
            trace_alone(number)
        for numbers in alike.calls([number for number in range(len(self.groups)) if number not in found]):
            views = tuple(view for number in numbers for view in self.groups[number].views)
            found |= alike.split(numbers, self.trace_group(FusingGroup(views=views), undone))
        for number in range(len(self.groups)):
            if number not in found:
                trace_alone(number)
        return [found[number] for number in range(len(self.groups))]

    def copies(self) -> Iterator[Copy]:
        """Yield the copies of all groups, in order."""
        for traced in self.traces:
            yield from traced.copies

    @property
    def is_current(self) -> bool:
        """Whether the tensors that the copies fill are still the model's; SGLang may put others in their places.

        Asked before each pull, so it only looks at those tensors, and without a loop in Python: that took 0.1 ms
        longer.
        """
        owners, names, addresses = self._places
        found: list[Any] = list(map(dict.get, owners, names))
        where: Callable[[Any], int] = address if self.device.type == "meta" else torch.Tensor.data_ptr
        return all(map(operator.is_not, found, itertools.repeat(None))) and tuple(map(where, found)) == addresses

    @property
    def knows_all_parameters(self) -> bool:
        """Whether no parameter lies where none lay before: a tied head that got memory of its own, say."""
        return parameter_addresses(self.model) <= self._parameters

    def refresh(self) -> None:
        """Trace again if SGLang has replaced a tensor."""
        if not self.is_current:
            self.run()

    def filled_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return all that a load fills, makes zero, computes or derives: the engine's name, and the tensor or a part of
        it.
        """
        if self._filled is None:
            parts, found = _parts(self.traces), dict[int, tuple[str, torch.Tensor]]()
            for name, tensor in model_tensors(self.model).items():
                own = [part for part in parts.get(storage(tensor), ()) if begins_within(part, tensor)]
                whole = name in self.derived or (own and not missing_elements(tensor, own))
                for part in [tensor] if whole else own:
                    found.setdefault(id(part), (name, part))
            self._filled = list(found.values())
        return self._filled

    def groups_to_load(self) -> set[int]:
        """Return the numbers of the groups that only the model's own load_weights can load: it does more than copy."""
        inside = {storage(tensor) for tensor in model_tensors(self.model).values()}
        return {
            number
            for number, traced in enumerate(self.traces)
            # A copy into a tensor that the loader then puts into the model does not last.
            if not traced.only_copies or any(storage(copy.target) not in inside for copy in traced.copies)
        }

    def _find_what_is_derived_over(self) -> None:
        before = derived_tensors(self.model)
        with torch.no_grad(), UndoneWrites(self.model) as undone:
            self.model.post_load_weights()
            changed = set(undone.saved)
            self.derived |= {name for name, *_ in undone.replaced()}
            self.derived |= {
                name
                for name, each in derived_tensors(self.model).items()
                if name not in before or storage(each) in changed
            }
            held = {storage(each) for each in self.model.parameters()}
            made = {storage(each): each.untyped_storage().nbytes() for each in derived_tensors(self.model).values()}
        self.derived_bytes = sum(nbytes for place, nbytes in made.items() if place not in held)
        for traced in self.traces:
            lost = [copy for copy in traced.copies if storage(copy.target) in changed]
            self.derived_over |= {copy.source.name for copy in lost}
            traced.give_up(lost)

    def trace_group(self, group: FusingGroup, undone: UndoneWrites) -> GroupTrace:
        """Trace one group, and take back by `undone` what it changes.

        Also catch what no dispatch mode sees: a loader that puts a tensor in a parameter's place.

        The memory is on the CPU, as when SGLang loads from disk. It is never touched, so it costs nothing. For a model
        on the meta device it is there too. If the loader ends with SGLang's own post-load step, that is noted, not run.
        """
        memory = group.empty_tensors("meta" if self.device.type == "meta" else "cpu")
        sent = {storage(tensor) for tensor in memory.values()}
        with undone.told(), self.post_load_noted():
            traced = trace_loader(self.model.load_weights, group.views, memory, undone)
            replaced = list(undone.replaced())
            if not (traced.error or self.only_once) and (removed := undone.removed()):
                again = trace_loader(self.model.load_weights, group.views, memory, undone)
                self.only_once = again.error and f"it removes {_some(removed)}, and the next load raises {again.error}"
        attributes = derived_tensors(self.model) if replaced else {}
        names = {view.name for view in group.views}
        if len(names) == 1 and traced.aimed is not None:
            self.aimed[group.views[0].name] = traced.aimed
        for name, before, now in replaced:
            traced.does_more = True
            traced.computed.append(before)
            if name in attributes:
                self.derived.add(name)
                traced.computed_with |= set() if traced.computed_with | traced.opaque else names
                continue
            if storage(now) in sent:
                traced.error = f"it puts the tensor it is given in the place of its {name.rpartition('.')[2]} instead of copying it"
            traced.give_up([copy for copy in traced.copies if storage(copy.target) == storage(before)])
            traced.opaque |= names
        return traced

    @contextmanager
    def post_load_noted(self) -> Iterator[None]:
        """Leave SGLang's own post-load step out, and note that the loader asked for it."""

        def note(*_: object, **__: object) -> None:
            self.derives = True

        with ExitStack() as stack:
            for model in models_in(self.model):
                if hasattr(model, "post_load_weights"):
                    stack.enter_context(patch.object(model, "post_load_weights", note))
            yield

    def coverage(self) -> LoadCoverage:
        """Return what the traces mean for the trainer."""
        elements = Counter[torch.dtype]()
        for parameter in self.model.parameters():
            elements[parameter.dtype] += parameter.numel()
        found = LoadCoverage(rank=dist.get_rank(), dtype=elements.most_common(1)[0][0], derives=self.derives)
        found.only_once = self.only_once
        # The loader cannot be asked whether it derives what it has stopped to: the tensors that are there tell.
        found.not_renewed = [
            f"{name} (of {DERIVED[name.rpartition('.')[2]]})"
            for name in derived_tensors(self.model)
            if name.rpartition(".")[2] in DERIVED and name not in self.derived
        ]
        if any(traced.zeros for traced in self.traces):
            found.sizes = ModelSizes.of(self.model)
        name_of = self._names()
        self.without_refused = list(self.traces)
        undone = UndoneWrites(self.model) if any(traced.error for traced in self.traces) else None
        for number, (group, traced) in enumerate(zip(self.groups, self.traces, strict=True)):
            while undone and traced.error:
                blamed = self._blame(group, traced.views, undone, traced.error)
                found.errors |= blamed
                traced = self._trace_others(group, traced.views, blamed, undone)
            self.without_refused[number] = traced
            found.copies.append(
                [LoaderCopy(copy.source, name_of(copy.target), copy.target.dtype) for copy in traced.copies]
            )
            if padding := traced.find_padding():
                zeros = Counter[str]()
                for part in padding:
                    zeros[name_of(part)] += part.numel()
                found.padded[number] = dict(zeros)
            found.unknown += [view.name for view in traced.views if view.name not in traced.used]
            found.opaque += sorted(traced.opaque)
            computing = {view.of for view in group.views if view.name in traced.opaque | traced.computed_with}
            found.computing += sorted(computing)
            found.derived_over += sorted({view.of for view in group.views if view.name in self.derived_over})
        found.missing = self._missing()
        if found.errors:
            refused = [name for names in found.errors for name in names]
            excuse(found.missing, refused, found.copies)
            found.aimed = {name: name_of(self.aimed[name]) for name in refused if name in self.aimed}
        for first, second in written_twice(self.copies()):
            if into := name_of(second.target):
                found.overwritten.setdefault(into, (first.source.name, second.source.name))
        return found

    def name_of(self, part: torch.Tensor) -> str:
        """Return the engine's own name of the tensor that a part begins in; "" if it is in none."""
        return self._names()(part)

    def _names(self) -> Callable[[torch.Tensor], str]:
        tensors = model_tensors(self.model)
        in_storage: dict[int, list[str]] = defaultdict(list)
        for name, tensor in tensors.items():
            in_storage[storage(tensor)].append(name)

        def name_of(part: torch.Tensor) -> str:
            return next((name for name in in_storage[storage(part)] if begins_within(part, tensors[name])), "")

        return name_of

    def _missing(self) -> dict[str, tuple[int, int]]:
        parts = _parts(self.without_refused)
        return {
            name: (missing_elements(each, parts[storage(each)]), each.numel())
            for name, each in sent_parameters(self.model)
        }

    def _blame(
        self, group: FusingGroup, views: tuple[TensorView, ...], undone: UndoneWrites, error: str = ""
    ) -> dict[tuple[str, ...], str]:
        """Return those of some tensors of a group that the loader refuses, alone or together, and what it raises.

        They are halved again and again, as a group of experts has thousands. error: what it raises for all of them, if
        that is known.
        """
        error = error or self._raised(group, views, undone)
        if not error or len(views) == 1:
            return {(view.name,): error for view in views if error}
        half = len(views) // 2
        found = self._blame(group, views[:half], undone) | self._blame(group, views[half:], undone)
        if found:
            return found
        # Neither half alone: those without which it raises nothing.
        together = tuple(
            view.name
            for view in views
            if not self._raised(group, tuple(each for each in views if each is not view), undone)
        )
        return {together or tuple(view.name for view in views): error}

    def _raised(self, group: FusingGroup, views: tuple[TensorView, ...], undone: UndoneWrites) -> str:
        return self.trace_group(replace(group, views=views), undone).error

    def _trace_others(
        self,
        group: FusingGroup,
        views: tuple[TensorView, ...],
        blamed: Mapping[tuple[str, ...], str],
        undone: UndoneWrites,
    ) -> GroupTrace:
        """Return what the loader does with those of some tensors of a group that it does not refuse."""
        refused = {name for names in blamed for name in names}
        others = tuple(view for view in views if view.name not in refused)
        return self.trace_group(replace(group, views=others), undone) if others else GroupTrace(())


def _parts(traces: Sequence[GroupTrace]) -> dict[int, list[torch.Tensor]]:
    """Return what these groups' loads write, by address of the storage."""
    parts: dict[int, list[torch.Tensor]] = defaultdict(list)
    for traced in traces:
        for part in (*(copy.target for copy in traced.copies), *traced.zeros, *traced.computed):
            parts[storage(part)].append(part)
    return parts


def _some(names: Sequence[str]) -> str:
    """Name the first, and say how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def missing_elements(tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> int:
    """Return how many elements of a tensor are in none of the parts, which are views of its storage."""
    parts = sorted((part for part in parts if part.numel()), key=address)
    if all(part.is_contiguous() for part in parts):  # whole rows, as almost always: no need to mark each element
        ends = [address(part) + part.nbytes for part in parts]
        if all(end <= address(part) for end, part in zip(ends, parts[1:], strict=False)):
            return max(0, tensor.numel() - sum(part.numel() for part in parts if begins_within(part, tensor)))
    missing = torch.ones(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=torch.bool)
    for part in parts:
        missing.as_strided(part.shape, part.stride(), part.storage_offset()).fill_(False)
    return int(missing.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).count_nonzero())


def begins_within(part: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether `part`, which shares the tensor's storage, begins inside the tensor."""
    reach = span(tensor.shape, tensor.stride()) * tensor.element_size()
    return 0 <= address(part) - address(tensor) < max(reach, 1)


def parameter_addresses(model: Any) -> frozenset[int]:
    """Return where the model's parameters lie.

    SGLang gives some of them another name as it needs them, and no other place.
    """
    return frozenset(address(each) for each in model.parameters())


@dataclass(slots=True)
class KindsOfGroups:
    """What the loader did with one group of each kind alone, by which groups that were loaded together are judged.

    Two groups are of one kind if the same tensors are sent for them under names that differ in numbers alone. A group
    that was loaded together with others is believed if the loader did with it what it does with one of its kind alone.
    So a loader that waits for a tensor of another group is still seen.
    """

    groups: Sequence[FusingGroup]
    _kinds: list[Hashable] = field(init=False)
    _alone: dict[Hashable, set[Hashable]] = field(init=False)
    """Kind -> what was seen of groups of it alone."""

    def __post_init__(self) -> None:
        self._kinds = [_kind(group) for group in self.groups]
        self._alone = defaultdict(set)

    def first_of_each_kind(self) -> list[int]:
        """Return the number of the first group of each kind, and of groups that have a name or tensor in common with
        others.
        """
        names = Counter(name for group in self.groups for name in _names(group))
        shared = [number for number, group in enumerate(self.groups) if any(names[name] > 1 for name in _names(group))]
        firsts = {kind: number for number, kind in reversed(list(enumerate(self._kinds)))}
        return sorted({*firsts.values(), *shared})

    def saw_alone(self, number: int, traced: GroupTrace) -> None:
        """Note what the loader did with a group alone. Only a group that was traced whole may stand for others."""
        if _is_plain(traced):
            self._alone[self._kinds[number]].add(_pattern(traced.copies))

    def calls(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yield the numbers of groups to load in one call each, of kinds that may be loaded together."""
        call, nbytes = list[int](), 0
        for number in numbers:
            if not self._alone[self._kinds[number]]:
                continue
            size = sum(view.nbytes for view in self.groups[number].views)
            if call and nbytes + size > CALL_BYTES:
                yield call
                call, nbytes = [], 0
            call.append(number)
            nbytes += size
        if call:
            yield call

    def split(self, numbers: Sequence[int], traced: GroupTrace) -> dict[int, GroupTrace]:
        """Return the traces of those of the groups loaded in one call that are believed."""
        if not _is_plain(traced):
            return {}
        number_of = {view.name: number for number in numbers for view in self.groups[number].views}
        copies: dict[int, list[Copy]] = {number: [] for number in numbers}
        for copy in traced.copies:
            copies[number_of[copy.source.name]].append(copy)
        return {
            number: GroupTrace(self.groups[number].views, copies=each, used={copy.source.name for copy in each})
            for number, each in copies.items()
            if _pattern(each) in self._alone[self._kinds[number]]
        }


def _is_plain(traced: GroupTrace) -> bool:
    return traced.only_copies and not (traced.zeros or traced.computed or traced.computed_with)


def _names(group: FusingGroup) -> Iterator[str]:
    yield from (view.name for view in group.views)
    yield from (f"of {of}" for of in dict.fromkeys(view.of for view in group.views))


def _kind(group: FusingGroup) -> Hashable:
    return tuple((without_numbers(view.of), view.dtype, *_read(view)) for view in group.views)


def _pattern(copies: Sequence[Copy]) -> Hashable:
    return tuple((*_read(copy.source), copy.target.dtype, copy.target.shape) for copy in copies)


def _read(view: TensorView) -> tuple[Hashable, ...]:
    return without_numbers(view.name), view.shape, view.stride, view.offset
