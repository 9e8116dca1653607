"""What SGLang's own load_weights would do with each checkpoint tensor, found out by running it without letting it.

The model's loader runs on views of a slot under a dispatch mode that notes each copy from the slot into the model
instead of making it. So the engine itself says which of its elements a tensor fills, which names it ignores, and which
tensors it does more with than copy. Nothing here knows an architecture.
"""

import concurrent.futures
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.weights.stream.slots import SlotEntry

aten = torch.ops.aten


@dataclass(slots=True)
class Copy:
    """One copy from the slot into the model."""

    target: torch.Tensor
    source: torch.Tensor | None
    """A strided view of the slot, of the target's shape; None where the elements went through a cat on the way."""
    index: torch.Tensor | None
    """int64, of the target's shape: each element's place in the slot, counted in elements; where source is None."""
    names: tuple[str, ...]
    dtype: torch.dtype
    """Of the slot's elements."""


@dataclass(slots=True)
class Traced:
    """What the loader did with the entries of one group."""

    entries: tuple[SlotEntry, ...]
    copies: list[Copy] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    """Names of which at least one element was read, whatever became of it."""
    opaque: set[str] = field(default_factory=set)
    """Names that went through an operation that is not followed."""
    does_more: bool = False
    """The loader computed something beside copying: it must run itself."""
    error: str = ""
    """What it raised."""

    @property
    def only_copies(self) -> bool:
        """Whether the copies alone are the whole load."""
        return not (self.does_more or self.opaque or any(copy.source is None for copy in self.copies))


class Recorder(TorchDispatchMode):
    """Notes copies out of the slot instead of making them; all else runs as it is."""

    def __init__(self, slot: torch.Tensor, traced: Traced) -> None:
        super().__init__()
        self.slot_at = slot.untyped_storage().data_ptr()
        self.traced = traced
        self.by_offset = sorted(traced.entries, key=lambda entry: entry.offset)
        self.starts = [entry.offset for entry in self.by_offset]
        self.moved: dict[int, Moved] = {}
        """By address of the storage."""
        self.made: dict[int, torch.Tensor] = {}
        """What the loader made itself, by address of the storage; kept, so that no address is used again."""
        self.tainted: dict[int, set[str]] = {}
        """Names whose elements went, in a way that is not followed, into a storage."""
        self.escaped: set[str] = set()
        """Names of which a value became a Python number: whatever is written afterwards may come from it."""
        self.undone: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        tensors = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, torch.Tensor)]
        sources = [tensor for tensor in tensors if self._in_slot(tensor) or self._moved(tensor)]
        if function is aten.copy_.default and sources and sources[0] is arguments[1]:
            self._note(arguments[0], arguments[1])
            if _address(arguments[0]) in self.made:  # not filled, so what it goes into next must not be kept
                self.tainted.setdefault(_address(arguments[0]), set()).update(self._names(arguments[1]))
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
        results = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.made |= {_address(each): each for each in results if not function._schema.is_mutable}
        if not names:
            self.traced.does_more = True
            return result
        self.traced.used |= names
        pieces = _pieces(function, arguments, keywords, result)
        if pieces and all(self._in_slot(source) for _, source in pieces):
            self.moved[result.untyped_storage().data_ptr()] = Moved(result, pieces)
        else:
            self.traced.opaque |= names
            for tensor in (*results, *written):
                if _address(tensor) in self.made:
                    self.tainted.setdefault(_address(tensor), set()).update(names)
            if function is aten._local_scalar_dense.default:
                self.escaped |= names
        return result

    def undo(self) -> None:
        """Put back what was written over by something that came from the slot."""
        for tensor, before in reversed(self.undone):
            tensor.copy_(before)

    def _in_slot(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != "meta" and tensor.untyped_storage().data_ptr() == self.slot_at

    def _moved(self, tensor: torch.Tensor) -> "Moved | None":
        return None if tensor.device.type == "meta" else self.moved.get(tensor.untyped_storage().data_ptr())

    def _note(self, target: torch.Tensor, source: torch.Tensor) -> None:
        moved = self._moved(source)
        if moved is None:
            self._add(target, source.expand(target.shape), None)
        elif _same_view(source, moved.result) and target.shape == source.shape:
            for where, piece in moved.pieces:
                self._add(target[where], piece, None)
        else:
            self._add(target, None, moved.index(source).expand(target.shape), source.dtype)

    def _add(
        self, target: torch.Tensor, source: torch.Tensor | None, index: torch.Tensor | None, dtype: Any = None
    ) -> None:
        dtype = dtype or (source.dtype if source is not None else None)
        names = tuple(sorted(self._names(source) if source is not None else self._names_at(index, dtype)))
        self.traced.used.update(names)
        self.traced.copies.append(Copy(target=target, source=source, index=index, names=names, dtype=dtype))

    def _names(self, tensor: torch.Tensor) -> set[str]:
        moved = self._moved(tensor)
        if moved is not None:
            return {name for _, piece in moved.pieces for name in self._names(piece)}
        offset = tensor.storage_offset() * tensor.dtype.itemsize
        return {self._name(int(offset))}

    def _names_at(self, index: torch.Tensor | None, dtype: torch.dtype) -> set[str]:
        assert index is not None
        offsets = (index.flatten().unique() * dtype.itemsize).tolist()
        return {self._name(offset) for offset in offsets}

    def _name(self, offset: int) -> str:
        """Whose element begins at that byte; tensors may lie side by side, row by row."""
        last = bisect_right(self.starts, offset) - 1
        holding = (entry for entry in reversed(self.by_offset[: last + 1]) if entry.holds(offset))
        return next(holding, self.by_offset[last]).name


@dataclass(slots=True)
class Moved:
    """A tensor made of slot elements, such as the cat of two halves."""

    result: torch.Tensor
    """Kept, so that its address is not used again."""
    pieces: list[tuple[Any, torch.Tensor]]
    """(subscript of a part of the result, view of the slot that the part is a copy of)."""

    def index(self, view: torch.Tensor) -> torch.Tensor:
        """int64, of the view's shape: each element's place in the slot, in elements; the view is one of the result."""
        places = torch.full((self.result.untyped_storage().nbytes() // self.result.dtype.itemsize,), -1)
        places = places.to(self.result.device)
        for where, piece in self.pieces:
            inside = self.result[where]
            places.as_strided(inside.shape, inside.stride(), inside.storage_offset()).copy_(element_index(piece))
        return places.as_strided(view.shape, view.stride(), view.storage_offset())


def _pieces(function: Any, arguments: Any, keywords: Any, result: Any) -> list[tuple[Any, torch.Tensor]] | None:
    """For an operation that only moves elements: (subscript of the result, argument that it holds). Else None."""
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


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.stride(), one.storage_offset()) == (other.shape, other.stride(), other.storage_offset())


def element_index(tensor: torch.Tensor) -> torch.Tensor:
    """int64, of the tensor's shape: each element's position in its storage."""
    index = torch.full((), int(tensor.storage_offset()), dtype=torch.int64, device=tensor.device)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        index = index.unsqueeze(-1) + torch.arange(size, device=tensor.device) * stride
    return index


def trace(
    load: Callable[[list[tuple[str, torch.Tensor]]], Any], entries: Sequence[SlotEntry], slot: torch.Tensor
) -> Traced:
    """Run `load`, a model's load_weights, on one group's entries without changing what they fill.

    What a loader derives from weights that it already holds, such as DeepSeek's absorbed projections, it derives anew.
    """
    traced = Traced(tuple(entries))
    views = [(entry.name, entry.view(slot)) for entry in entries]
    recorder = Recorder(slot, traced)
    try:
        with torch.no_grad(), threads_inline(), recorder:
            load(views)
    except Exception as error:  # asserts, shape errors, KeyErrors: whatever an architecture's loader raises
        traced.error = f"{type(error).__name__}: {error}".strip()
    with torch.no_grad():
        recorder.undo()
    return traced


@contextmanager
def threads_inline() -> Iterator[None]:
    """While open, a new ThreadPoolExecutor works in its caller: a dispatch mode sees its own thread alone."""
    with patch.object(concurrent.futures, "ThreadPoolExecutor", _Inline):
        yield


class _Inline(concurrent.futures.Executor):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(function(*arguments, **keywords))
        except Exception as error:
            future.set_exception(error)
        return future


def _address(tensor: torch.Tensor) -> int:
    return 0 if tensor.device.type == "meta" else tensor.untyped_storage().data_ptr()


def _written(function: Any, arguments: Any, keywords: Any) -> list[torch.Tensor]:
    """The tensors that the operation writes into."""
    if not function._schema.is_mutable:
        return []
    given = [
        arguments[place] if place < len(arguments) else keywords.get(value.name)
        for place, value in enumerate(function._schema.arguments)
        if value.alias_info is not None and value.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]


def _is_view(function: Any) -> bool:
    """Whether the operation returns aliases of what it was given, and writes nothing."""
    if function is aten._unsafe_view.default:  # an alias all the same, as reshape makes it of a copy
        return True
    schema = function._schema
    aliases = schema.returns and all(value.alias_info is not None for value in schema.returns)
    return bool(aliases) and not schema.is_mutable
