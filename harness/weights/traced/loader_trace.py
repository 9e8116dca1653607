"""Dry-run a model's load_weights under a TorchDispatchMode and record what it copies where.

The loader gets views of memory that is never touched. Each copy from there into the model, and each zero of a padding,
is recorded instead of made. So the engine itself says which of its elements a tensor fills, which names it ignores, and
with which tensors it does more than copy. Everything else that the loader does is done, and taken back (undo.py).
"""

import concurrent.futures
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.weights.tensor_view import TensorView, span
from harness.weights.traced.undo import UndoneWrites, address, is_view, storage, tensors_in, written

aten = torch.ops.aten
ONLY_SHAPE = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_empty.default,
}
"""Operators that take shape, dtype and device of their argument, and no value."""
Pieces = list[tuple[Any, torch.Tensor]]
"""(subscript of a part of a tensor, view of the memory that the part is a copy of)."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy that the loader makes into the model."""

    target: torch.Tensor
    source: TensorView
    """What it reads of one of the tensors that are sent."""


@dataclass(slots=True)
class GroupTrace:
    """What the loader did with the tensors of one group."""

    views: tuple[TensorView, ...]
    copies: list[Copy] = field(default_factory=list)
    zeros: list[torch.Tensor] = field(default_factory=list)
    """Parts of the model that are zero before the copies, such as the padding of a vocabulary."""
    computed: list[torch.Tensor] = field(default_factory=list)
    """Parts of the model that the loader writes otherwise: what it computes, and copies that are not followed."""
    used: set[str] = field(default_factory=set)
    """Names of which at least one element was read."""
    opaque: set[str] = field(default_factory=set)
    """Names that went through an operation that is not followed, or whose copy does not last."""
    computed_with: set[str] = field(default_factory=set)
    """Names whose copies the loader reads again, to compute something with them."""
    does_more: bool = False
    """The loader computed something besides copying: it must run itself."""
    error: str = ""
    aimed: torch.Tensor | None = None
    """What the loader was about to fill when it raised, if it took a view of it: all or a part of a parameter."""

    @property
    def only_copies(self) -> bool:
        """Whether the zeros and copies alone are the whole load."""
        return not (self.error or self.does_more or self.opaque)

    def find_padding(self) -> list[torch.Tensor]:
        """Return the zeros that stay, as no copy goes there."""
        copied = defaultdict(list)
        for copy in self.copies:
            copied[storage(copy.target)].append(copy.target)
        return [zeros for zeros in self.zeros if not any(overlap(each, zeros) for each in copied[storage(zeros)])]

    def give_up(self, copies: Sequence[Copy]) -> None:
        """Say of some of the copies that they do not last, as something else is written over them."""
        lost = {id(copy) for copy in copies}
        self.opaque |= {copy.source.name for copy in copies}
        self.computed += [copy.target for copy in copies]
        self.copies = [copy for copy in self.copies if id(copy) not in lost]


def trace_loader(
    load: Callable[[list[tuple[str, torch.Tensor]]], Any],
    views: Sequence[TensorView],
    memory: Mapping[str, torch.Tensor],
    undone: UndoneWrites,
) -> GroupTrace:
    """Run `load`, the load_weights of a model, on the tensors of one group.

    memory: a contiguous tensor for each `of` of the views. undone: keeps what is written, so call this in its block
    `told()`.
    """
    traced = GroupTrace(tuple(views))
    recorder = _Recorder(memory, traced, undone)
    tensors = [(view.name, view.in_memory(memory[view.of])) for view in views]
    try:
        with torch.no_grad(), in_this_thread(), recorder:
            load(tensors)
    except Exception as error:  # asserts, shape errors, KeyErrors: whatever the loader of an architecture raises
        traced.error = f"{type(error).__name__}: {error}".strip()
        traced.aimed = recorder.viewed
    recorder.finish()
    return traced


def in_this_thread() -> AbstractContextManager[object]:
    """Have loaders that start threads do their work in this one: a dispatch mode only sees its own thread."""
    return patch.object(concurrent.futures, "ThreadPoolExecutor", _InlineExecutor)


class _Recorder(TorchDispatchMode):
    """Record copies out of the memory, and zeros, instead of making them. All other operations run."""

    def __init__(self, memory: Mapping[str, torch.Tensor], traced: GroupTrace, undone: UndoneWrites) -> None:
        super().__init__()
        self.undone = undone
        self.sent = {storage(tensor): of for of, tensor in memory.items()}
        """Address of the memory -> the tensor that it stands for."""
        self.traced = traced
        self.views: dict[str, list[TensorView]] = {of: [] for of in memory}
        for view in sorted(traced.views, key=lambda view: view.offset):
            self.views[view.of].append(view)
        self.offsets = {of: [view.offset for view in views] for of, views in self.views.items()}
        self.moved: dict[int, tuple[torch.Tensor, Pieces]] = {}
        """Tensors made of elements of the memory, such as the cat of two halves, by address of their storage."""
        self.made: dict[int, torch.Tensor] = {}
        """Tensors that the loader made itself, by address of their storage; kept so that no address is used again."""
        self.blank: set[int] = set()
        """Those of them that are nothing but zeros, with which SGLang pads what is too short on a GPU.

        Not zeros_like of what is sent: that a rank has zeros in its place, as gpt-oss has of biases that are added up,
        is meant.
        """
        self.tainted: dict[int, set[str]] = {}
        """Address of a storage -> names whose elements went into it in a way that is not followed."""
        self.recorded: dict[int, list[Copy]] = defaultdict(list)
        """Address of a storage of the model -> the copies into it, which were not made: who reads it computes with
        them."""
        self.numbers: dict[float, torch.Tensor] = {}
        """Numbers given out for elements that the loader asked for as Python numbers -> the element."""
        self.viewed: torch.Tensor | None = None
        """The tensor of the model of which the loader last took a view."""
        self.escaped: set[str] = set()
        """Names whose elements became Python numbers: whatever is computed afterwards may come from them."""

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        if is_view(function):
            self.viewed = arguments[0] if self._of_the_model(arguments[0]) else self.viewed
            return function(*arguments, **keywords)
        if function is aten.copy_.default and (names := self._followed(arguments[1])):
            self._record(arguments[0], arguments[1], names)
            return arguments[0]
        if function is aten.copy_.default and self._is_blank(arguments[1]) and self._is_padding(arguments[0]):
            self._record_zeros(arguments[0])
            return arguments[0]
        if function is aten.fill_.Scalar and arguments[1] in self.numbers:
            element = self.numbers[arguments[1]]
            self._record(arguments[0], element, self._names(element))
            return arguments[0]
        if function is aten._local_scalar_dense.default and self._followed(arguments[0]):
            return self._number(arguments[0])
        if _zeroes(function, arguments) and self._is_padding(arguments[0]):
            self._record_zeros(arguments[0])
            return arguments[0]
        return self._run(function, arguments, keywords)

    def _is_padding(self, target: torch.Tensor) -> bool:
        """Return whether zeros there are zeros before the copies, which nothing that was sent decided."""
        return not self.escaped and self._of_the_model(target) and not self._recorded_in(target)

    def _record_zeros(self, target: torch.Tensor) -> None:
        self.traced.zeros += [target] if target.numel() else []

    def _is_blank(self, tensor: torch.Tensor) -> bool:
        return storage(tensor) in self.blank

    def _recorded_in(self, tensor: torch.Tensor) -> list[Copy]:
        """Return the copies that would have written elements of this tensor."""
        return [copy for copy in self.recorded.get(storage(tensor), ()) if overlap(copy.target, tensor)]

    def _followed(self, tensor: torch.Tensor) -> set[str]:
        """Return the names of a tensor whose elements are those of the memory, as they were sent; none for any
        other.
        """
        place = storage(tensor)
        if place not in self.sent and place not in self.moved:
            return set()
        names = self._names(tensor)
        # What was computed with may have been changed in place.
        return set() if names & self.traced.opaque else names

    def _number(self, element: torch.Tensor) -> float:
        """Return a number that nothing else is, for the loader to fill a tensor with; the element itself is unknown."""
        self.traced.used |= self._names(element)
        self.escaped |= self._names(element)
        if not element.is_floating_point() or storage(element) in self.moved:
            return element.new_zeros(()).item()
        number = 0.5 + len(self.numbers) / math.pi
        self.numbers[number] = element
        return number

    def _run(self, function: Any, arguments: Any, keywords: Any) -> Any:
        """Do what is not followed, and note what it does with which names."""
        tensors, into = tensors_in((arguments, keywords)), written(function, arguments, keywords)
        read_from = () if function in ONLY_SHAPE else tensors
        names = {name for tensor in read_from for name in self._sent_in(tensor)}
        fills_model = any(self._of_the_model(tensor) for tensor in into)
        names |= self.escaped if fills_model else set()
        read = {copy.source.name for tensor in read_from for copy in self._recorded_in(tensor)}
        self.traced.computed_with |= read
        if fills_model and not names and not read:
            self.traced.computed_with |= {view.name for view in self.traced.views}  # it could come of any
        result = self.undone.run(function, arguments, keywords)
        results = tensors_in(result)
        if not function._schema.is_mutable:
            self.made |= {storage(each): each for each in results}
        self.blank -= {storage(each) for each in into}
        if function is aten.zeros.default:
            self.blank.add(storage(result))
        for tensor in into:
            self._note_computed(tensor)
        if not names:
            self.traced.does_more = True
            return result
        self.traced.used |= names
        pieces = _pieces(function, arguments, keywords, result)
        if pieces and all(
            self._is_blank(source) or (storage(source) in self.sent and self._followed(source)) for _, source in pieces
        ):
            self.moved[storage(result)] = result, pieces
            return result
        self.traced.opaque |= names
        for tensor in (*results, *into):
            self._taint(tensor, names)
        return result

    def _sent_in(self, tensor: torch.Tensor) -> set[str]:
        """Return the names whose elements a tensor holds, as they were sent or after something was computed with
        them.
        """
        known = storage(tensor) in self.sent or storage(tensor) in self.moved
        return (self._names(tensor) if known else set()) | self.tainted.get(storage(tensor), set())

    def _of_the_model(self, tensor: torch.Tensor) -> bool:
        return storage(tensor) not in self.sent and storage(tensor) not in self.made

    def _note_computed(self, target: torch.Tensor) -> None:
        """Note a part of the model that is computed. The copies that it overwrites do not last."""
        if not self._of_the_model(target) or not target.numel():
            return
        self.traced.computed.append(target)
        self.traced.give_up(self._recorded_in(target))

    def _taint(self, tensor: torch.Tensor, names: set[str]) -> None:
        if storage(tensor) in self.made:
            self.tainted.setdefault(storage(tensor), set()).update(names)

    def _record(self, target: torch.Tensor, source: torch.Tensor, names: set[str]) -> None:
        """Note one copy of the tensors of these names.

        If its source was made by cat or clone, only the whole of it is followed, not a view of it.
        """
        self.traced.used |= names
        self.blank.discard(storage(target))
        self._taint(target, names)  # it was not filled, so a tensor that it goes into next must not be kept
        moved = self.moved.get(storage(source))
        if moved and (_geometry(source), target.shape) != (_geometry(moved[0]), source.shape):
            self.traced.opaque |= names
            self._note_computed(target)
            return
        pieces = moved[1] if moved else [(..., source if source.shape == target.shape else source.expand(target.shape))]
        for where, piece in pieces:
            part = target[where] if moved else target
            if self._is_blank(piece):
                self._record_zeros(part)
                continue
            read = TensorView(
                name=self._name(piece) if moved else next(iter(names)),
                of=self.sent[storage(piece)],
                dtype=piece.dtype,
                shape=tuple(part.shape),
                stride=tuple(piece.stride()),
                offset=int(piece.storage_offset()),
            )
            place = storage(part)
            if any(overlap(zeros, part) for zeros in self.traced.zeros if storage(zeros) == place):
                self.traced.computed_with |= names  # which of the zeros stay is not followed
            self.traced.copies.append(Copy(part, read))
            if self._of_the_model(part):
                self.recorded[place].append(self.traced.copies[-1])

    def finish(self) -> None:
        """Give up on names that a loader read into Python numbers, which cannot be followed into the model."""
        self.traced.opaque |= self.escaped - {copy.source.name for copy in self.traced.copies}

    def _names(self, tensor: torch.Tensor) -> set[str]:
        _, pieces = self.moved.get(storage(tensor), (tensor, [(..., tensor)]))
        return {self._name(piece) for _, piece in pieces if not self._is_blank(piece)}

    def _name(self, piece: torch.Tensor) -> str:
        """Return the checkpoint tensor that the first element of a piece belongs to.

        Checkpoint tensors may lie side by side in one tensor, row by row, so the nearest one that begins before the
        element need not hold it.
        """
        of, element = self.sent[storage(piece)], int(piece.storage_offset())
        views, last = self.views[of], bisect_right(self.offsets[of], element) - 1
        return next((views[at] for at in range(last, -1, -1) if views[at].holds(element)), views[last]).name


class _InlineExecutor(concurrent.futures.Executor):
    """Run what is submitted in the thread of its caller."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(function(*arguments, **keywords))
        except Exception as error:
            future.set_exception(error)
        return future


def _pieces(function: Any, arguments: Any, keywords: Any, result: Any) -> Pieces | None:
    """Return the pieces that the result of cat, stack or clone is made of; None for any other operation."""
    if function is aten.clone.default or (function is aten._to_copy.default and arguments[0].dtype == result.dtype):
        return [(..., arguments[0])]
    if function not in (aten.cat.default, aten.stack.default):
        return None
    axis = (arguments[1] if len(arguments) > 1 else keywords.get("dim", 0)) % result.ndim
    pieces: Pieces = []
    start = 0
    for tensor in arguments[0]:
        size = 1 if function is aten.stack.default else tensor.shape[axis]
        where = start if function is aten.stack.default else slice(start, start + size)
        pieces.append(((*(slice(None),) * axis, where), tensor))
        start += size
    return pieces


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _zeroes(function: Any, arguments: Any) -> bool:
    return function is aten.zero_.default or (function is aten.fill_.Scalar and arguments[1] == 0)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two views of one storage may share an element.

    That is exact for parts of one larger tensor, such as its left and its right columns. For others it says whether the
    ranges from first to last element do.
    """
    if not one.numel() or not other.numel():
        return False
    if (one.stride(), one.dtype) == (other.stride(), other.dtype):
        boxes = _box(one), _box(other)
        if all(boxes):
            pairs = zip(*boxes, strict=True)
            return all(start < other_end and other_start < end for (start, end), (other_start, other_end) in pairs)
    (start, end), (other_start, other_end) = (
        (address(each), address(each) + span(each.shape, each.stride()) * each.itemsize) for each in (one, other)
    )
    return start < other_end and other_start < end


def _box(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return (start, end) along each axis within the storage, by falling stride; [] if the strides do not nest."""
    left, box, outer = int(tensor.storage_offset()), [], 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True):
        if step == 0:
            return []
        start, left = divmod(left, step)
        if outer and (start + size) * step > outer:
            return []
        box.append((start, start + size))
        outer = step
    return box if not left else []


def written_twice(copies: Iterable[Copy]) -> Iterator[tuple[Copy, Copy]]:
    """Yield two copies, in the order in which they are made, for each pair of names that fill the same elements. Which
    of them stays there would depend on the order of sending.

    Single numbers are left out, because SGLang keeps one scale for two fused weights, and both of them bring it.
    """
    in_storage: dict[int, list[tuple[int, Copy]]] = defaultdict(list)
    for number, copy in enumerate(copies):
        in_storage[storage(copy.target)].append((number, copy))
    for members in in_storage.values():
        if len(members) < 2:
            continue
        reaching: list[tuple[int, int, Copy]] = []  # copies before that reach beyond where the next one begins
        for start, end, number, copy in sorted((_range(number, each) for number, each in members), key=_order):
            reaching = [each for each in reaching if each[0] > start]
            for _, before, other in reaching:
                if copy.source.name != other.source.name and overlap(copy.target, other.target):
                    yield (other, copy) if before < number else (copy, other)
            if copy.target.numel() > 1:
                reaching.append((end, number, copy))


def _range(number: int, copy: Copy) -> tuple[int, int, int, Copy]:
    """Return where a copy begins and ends, in bytes, its number, and the copy."""
    start, target = address(copy.target), copy.target
    return start, start + _reach(target), number, copy


def _order(found: tuple[int, int, int, Copy]) -> tuple[int, int, int]:
    return found[:3]


def _reach(target: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to its last, both included."""
    if not target.numel():
        return 0
    return target.nbytes if target.is_contiguous() else span(target.shape, target.stride()) * target.itemsize
