"""Dry-run a model's load_weights under a TorchDispatchMode and record what it copies where.

The loader runs on views of a slot, and each copy from the slot into the model is recorded instead of made. So the engine
itself says which of its elements a tensor fills, which names it ignores, and which tensors it does more with than copy.
Nothing here knows an architecture.
"""

import concurrent.futures
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.weights.stream.slots import Region, SlotEntry

aten = torch.ops.aten
Pieces = list[tuple[Any, torch.Tensor]]
"""(subscript of a part of a tensor, view of the slot that the part is a copy of)."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy from the slot into the model; it keeps no slot alive."""

    target: torch.Tensor
    region: Region


@dataclass(slots=True)
class GroupTrace:
    """What the loader did with the entries of one group."""

    entries: tuple[SlotEntry, ...]
    copies: list[Copy] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    """Names of which at least one element was read."""
    opaque: set[str] = field(default_factory=set)
    """Names that went through an operation that is not followed."""
    does_more: bool = False
    """The loader computed something beside copying: it must run itself."""
    error: str = ""

    @property
    def only_copies(self) -> bool:
        """Whether the copies alone are the whole load."""
        by_index = any(copy.region.index is not None for copy in self.copies)
        return not (self.does_more or self.opaque or by_index)


def trace_loader(
    load: Callable[[list[tuple[str, torch.Tensor]]], Any], entries: Sequence[SlotEntry], slot: torch.Tensor
) -> GroupTrace:
    """Run `load`, the load_weights of a model, on the entries of one group without changing what they fill.

    What a loader derives from weights that it already holds, such as DeepSeek's absorbed projections, it derives anew.
    """
    traced = GroupTrace(tuple(entries))
    views = [(entry.name, entry.view(slot)) for entry in entries]
    recorder = _Recorder(slot, traced)
    # A dispatch mode sees its own thread alone.
    inline = patch.object(concurrent.futures, "ThreadPoolExecutor", _InlineExecutor)
    try:
        with torch.no_grad(), inline, recorder:
            load(views)
    except Exception as error:  # asserts, shape errors, KeyErrors: whatever the loader of an architecture raises
        traced.error = f"{type(error).__name__}: {error}".strip()
    with torch.no_grad():
        for tensor, before in reversed(recorder.undone):
            tensor.copy_(before)
    return traced


class _Recorder(TorchDispatchMode):
    """Records copies out of the slot instead of making them; all other operations run."""

    def __init__(self, slot: torch.Tensor, traced: GroupTrace) -> None:
        super().__init__()
        self.slot_at = slot.untyped_storage().data_ptr()
        self.traced = traced
        self.by_offset = sorted(traced.entries, key=lambda entry: entry.offset)
        self.moved: dict[int, _Moved] = {}
        self.made: dict[int, torch.Tensor] = {}
        """What the loader made itself, by address of the storage; kept, so that no address is used again."""
        self.tainted: dict[int, set[str]] = {}
        """Names whose elements went, in a way that is not followed, into a storage."""
        self.escaped: set[str] = set()
        """Names of which a value became a Python number: whatever is written afterwards may come from it."""
        self.undone: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What was written over by something that came from the slot, and a copy of what it was."""

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        tensors = _tensors((arguments, keywords))
        sources = [tensor for tensor in tensors if self._in_slot(tensor) or _address(tensor) in self.moved]
        if function is aten.copy_.default and sources and sources[0] is arguments[1]:
            self._record(arguments[0], arguments[1])
            if _address(arguments[0]) in self.made:  # not filled, so what it goes into next must not be kept
                self._taint(arguments[0], self._names(arguments[1]))
            return arguments[0]
        names = {name for tensor in sources for name in self._names(tensor)}
        names |= {name for tensor in tensors for name in self.tainted.get(_address(tensor), ())}
        written = _written(function, arguments, keywords)
        for tensor in written if names or self.escaped else ():
            if _address(tensor) not in self.made:
                self.undone.append((tensor, tensor.clone()))
        result = function(*arguments, **keywords)
        if _is_view(function):
            return result
        results = _tensors(result)
        self.made |= {_address(each): each for each in results if not function._schema.is_mutable}
        if not names:
            self.traced.does_more = True
            return result
        self.traced.used |= names
        pieces = _pieces(function, arguments, keywords, result)
        if pieces and all(self._in_slot(source) for _, source in pieces):
            self.moved[_address(result)] = _Moved(result, pieces)
        else:
            self.traced.opaque |= names
            for tensor in (*results, *written):
                if _address(tensor) in self.made:
                    self._taint(tensor, names)
            if function is aten._local_scalar_dense.default:
                self.escaped |= names
        return result

    def _in_slot(self, tensor: torch.Tensor) -> bool:
        return _address(tensor) == self.slot_at

    def _taint(self, tensor: torch.Tensor, names: set[str]) -> None:
        self.tainted.setdefault(_address(tensor), set()).update(names)

    def _record(self, target: torch.Tensor, source: torch.Tensor) -> None:
        moved = self.moved.get(_address(source))
        if moved is None:
            self._add(target, source.expand(target.shape))
        elif _same_view(source, moved.result) and target.shape == source.shape:
            for where, piece in moved.pieces:
                self._add(target[where], piece)
        else:
            self._add(target, source, moved.index(source).expand(target.shape).cpu())

    def _add(self, target: torch.Tensor, source: torch.Tensor, index: torch.Tensor | None = None) -> None:
        if index is None:
            names, stride, offset = self._names(source), tuple(source.stride()), int(source.storage_offset())
        else:
            names = {self._name(place * source.dtype.itemsize) for place in index.unique().tolist()}
            stride, offset = (), 0
        held = tuple(sorted(names))
        region = Region(held, source.dtype, tuple(target.shape), stride, offset, target.dtype, index)
        self.traced.used |= names
        self.traced.copies.append(Copy(target, region))

    def _names(self, tensor: torch.Tensor) -> set[str]:
        moved = self.moved.get(_address(tensor))
        if moved is not None:
            return {name for _, piece in moved.pieces for name in self._names(piece)}
        return {self._name(int(tensor.storage_offset()) * tensor.dtype.itemsize)}

    def _name(self, offset: int) -> str:
        """Return whose element begins at that byte; tensors may lie side by side, row by row."""
        last = bisect_right(self.by_offset, offset, key=lambda entry: entry.offset) - 1
        holding = (entry for entry in reversed(self.by_offset[: last + 1]) if entry.holds(offset))
        return next(holding, self.by_offset[last]).name


@dataclass(slots=True)
class _Moved:
    """A tensor made of slot elements, such as the cat of two halves; kept, so that its address is not used again."""

    result: torch.Tensor
    pieces: Pieces

    def index(self, view: torch.Tensor) -> torch.Tensor:
        """Return int64 of the view's shape: where in the slot each element is from. view: one of the result."""
        count = self.result.untyped_storage().nbytes() // self.result.dtype.itemsize
        places = torch.full((count,), -1, device=self.result.device)
        for where, piece in self.pieces:
            inside = self.result[where]
            places.as_strided(inside.shape, inside.stride(), inside.storage_offset()).copy_(element_index(piece))
        return places.as_strided(view.shape, view.stride(), view.storage_offset())


class _InlineExecutor(concurrent.futures.Executor):
    """Runs what is submitted in the thread of its caller."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(function(*arguments, **keywords))
        except Exception as error:
            future.set_exception(error)
        return future


def element_index(tensor: torch.Tensor) -> torch.Tensor:
    """Return int64 of the tensor's shape: the position of each element in its storage."""
    index = torch.full((), int(tensor.storage_offset()), dtype=torch.int64, device=tensor.device)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        index = index.unsqueeze(-1) + torch.arange(size, device=tensor.device) * stride
    return index


def _pieces(function: Any, arguments: Any, keywords: Any, result: Any) -> Pieces | None:
    """Return what the result of an operation that only moves elements holds; None for any other."""
    if function is aten.clone.default or (function is aten._to_copy.default and arguments[0].dtype == result.dtype):
        return [(..., arguments[0])]
    if function not in (aten.cat.default, aten.stack.default):
        return None
    axis = (arguments[1] if len(arguments) > 1 else keywords.get("dim", 0)) % result.ndim
    before = (slice(None),) * axis
    if function is aten.stack.default:
        return [((*before, position), tensor) for position, tensor in enumerate(arguments[0])]
    pieces, start = [], 0
    for tensor in arguments[0]:
        pieces.append(((*before, slice(start, start + tensor.shape[axis])), tensor))
        start += tensor.shape[axis]
    return pieces


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.stride(), one.storage_offset()) == (other.shape, other.stride(), other.storage_offset())


def _address(tensor: torch.Tensor) -> int:
    return -1 if tensor.device.type == "meta" else tensor.untyped_storage().data_ptr()


def _written(function: Any, arguments: Any, keywords: Any) -> list[torch.Tensor]:
    """Return the tensors that the operation writes into."""
    given = [
        arguments[place] if place < len(arguments) else keywords.get(value.name)
        for place, value in enumerate(function._schema.arguments)
        if value.alias_info is not None and value.alias_info.is_write
    ]
    return _tensors(given)


def _is_view(function: Any) -> bool:
    """Return whether the operation returns aliases of what it was given, and writes nothing."""
    if function is aten._unsafe_view.default:  # an alias all the same, as reshape makes it of a copy
        return True
    schema = function._schema
    aliases = schema.returns and all(value.alias_info is not None for value in schema.returns)
    return bool(aliases) and not schema.is_mutable
