"""Dry-run a model's load_weights under a TorchDispatchMode and record what it copies where.

The loader runs on views of a buffer, and each copy from the buffer into the model, and each zero of a padding, is recorded
instead of made. So the engine itself says which of its elements a tensor fills, which names it ignores, and which tensors it
does more with than copy.
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

from harness.weights.groups import PlacedTensor, SourceView
from harness.weights.names import span

aten = torch.ops.aten
Pieces = list[tuple[Any, torch.Tensor]]
"""(subscript of a part of a tensor, view of the buffer that the part is a copy of)."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy from the buffer into the model; it keeps no buffer alive."""

    target: torch.Tensor
    source: SourceView


@dataclass(slots=True)
class GroupTrace:
    """What the loader did with the entries of one group."""

    entries: tuple[PlacedTensor, ...]
    copies: list[Copy] = field(default_factory=list)
    zeros: list[torch.Tensor] = field(default_factory=list)
    """Parts of the model that are zero before the copies, such as the padding of a vocabulary."""
    used: set[str] = field(default_factory=set)
    """Names of which at least one element was read."""
    opaque: set[str] = field(default_factory=set)
    """Names that went through an operation that is not followed."""
    does_more: bool = False
    """The loader computed something beside copying: it must run itself."""
    error: str = ""

    @property
    def only_copies(self) -> bool:
        """Whether the zeros and copies alone are the whole load."""
        return not (self.error or self.does_more or self.opaque)


def trace_loader(
    load: Callable[[list[tuple[str, torch.Tensor]]], Any], entries: Sequence[PlacedTensor], buffer: torch.Tensor
) -> GroupTrace:
    """Run `load`, the load_weights of a model, on the entries of one group without changing what they fill.

    What a loader derives from weights that it holds, such as DeepSeek's absorbed projections, it derives anew.
    """
    traced = GroupTrace(tuple(entries))
    recorder = _Recorder(buffer, traced)
    # A dispatch mode sees its own thread alone.
    inline = patch.object(concurrent.futures, "ThreadPoolExecutor", _InlineExecutor)
    try:
        with torch.no_grad(), inline, recorder:
            load([(entry.name, entry.view(buffer)) for entry in entries])
    except Exception as error:  # asserts, shape errors, KeyErrors: whatever the loader of an architecture raises
        traced.error = f"{type(error).__name__}: {error}".strip()
    with torch.no_grad():
        for tensor, before in reversed(recorder.undone):
            tensor.copy_(before)
    return traced


class _Recorder(TorchDispatchMode):
    """Records copies out of the buffer, and zeros, instead of making them; all other operations run."""

    def __init__(self, buffer: torch.Tensor, traced: GroupTrace) -> None:
        super().__init__()
        self.buffer_at = storage(buffer)
        self.traced = traced
        self.by_offset = sorted(traced.entries, key=lambda entry: entry.offset)
        self.moved: dict[int, tuple[torch.Tensor, Pieces]] = {}
        """Tensors made of buffer elements, such as the cat of two halves, by address of the storage."""
        self.made: dict[int, torch.Tensor] = {}
        """What the loader made itself, by address of the storage; kept, so that no address is used again."""
        self.tainted: dict[int, set[str]] = {}
        """Names whose elements went, in a way that is not followed, into a storage."""
        self.escaped = False
        """A value became a Python number: whatever is written afterwards may come from it."""
        self.undone: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What was written over by something that came from the buffer, and a copy of what it was."""

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        tensors = _tensors((arguments, keywords))
        sources = [each for each in tensors if storage(each) == self.buffer_at or storage(each) in self.moved]
        if function is aten.copy_.default and sources and sources[0] is arguments[1]:
            self._record(arguments[0], arguments[1])
            return arguments[0]
        if _zeroes(function, arguments) and not self.escaped and self._of_the_model(arguments[0]):
            self._record_zeros(arguments[0])
            return arguments[0]
        names = {name for tensor in sources for name in self._names(tensor)}
        names |= {name for tensor in tensors for name in self.tainted.get(storage(tensor), ())}
        written = _written(function, arguments, keywords)
        for tensor in written if names or self.escaped else ():
            if storage(tensor) not in self.made:
                self.undone.append((tensor, tensor.clone()))
        result = function(*arguments, **keywords)
        if _is_view(function):
            return result
        results = _tensors(result)
        self.made |= {storage(each): each for each in results if not function._schema.is_mutable}
        if not names:
            self.traced.does_more = True
            return result
        self.traced.used |= names
        pieces = _pieces(function, arguments, keywords, result)
        if pieces and all(storage(source) == self.buffer_at for _, source in pieces):
            self.moved[storage(result)] = result, pieces
        else:
            self.traced.opaque |= names
            for tensor in (*results, *written):
                self._taint(tensor, names)
            self.escaped |= function is aten._local_scalar_dense.default
        return result

    def _of_the_model(self, tensor: torch.Tensor) -> bool:
        return storage(tensor) != self.buffer_at and storage(tensor) not in self.made

    def _record_zeros(self, target: torch.Tensor) -> None:
        """Note a part that is set to zero; over what was copied, that is left to the loader itself."""
        if any(_overlap(copy.target, target) for copy in self.traced.copies):
            self.traced.does_more = True
        elif target.numel():
            self.traced.zeros.append(target)

    def _taint(self, tensor: torch.Tensor, names: set[str]) -> None:
        if storage(tensor) in self.made:
            self.tainted.setdefault(storage(tensor), set()).update(names)

    def _record(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Note one copy; of what was moved, only the whole is followed, not a view of it."""
        names = self._names(source)
        self.traced.used |= names
        self._taint(target, names)  # not filled, so what it goes into next must not be kept
        moved = self.moved.get(storage(source))
        if moved and (_geometry(source), target.shape) != (_geometry(moved[0]), source.shape):
            self.traced.opaque |= names
            return
        pieces = moved[1] if moved else [(..., source.expand(target.shape))]
        for where, piece in pieces:
            stride, offset = tuple(piece.stride()), int(piece.storage_offset())
            part, name = target[where], self._name(offset * piece.dtype.itemsize)
            view = SourceView(name, piece.dtype, tuple(part.shape), stride, offset, target.dtype)
            self.traced.copies.append(Copy(part, view))

    def _names(self, tensor: torch.Tensor) -> set[str]:
        _, pieces = self.moved.get(storage(tensor), (tensor, [(..., tensor)]))
        return {self._name(int(piece.storage_offset()) * piece.dtype.itemsize) for _, piece in pieces}

    def _name(self, offset: int) -> str:
        """Return whose element begins at that byte; tensors may lie side by side, row by row."""
        last = bisect_right(self.by_offset, offset, key=lambda entry: entry.offset) - 1
        holding = (entry for entry in reversed(self.by_offset[: last + 1]) if entry.holds(offset))
        return next(holding, self.by_offset[last]).name


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


def _pieces(function: Any, arguments: Any, keywords: Any, result: Any) -> Pieces | None:
    """Return what the result of an operation that only moves elements holds; None for any other."""
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


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _zeroes(function: Any, arguments: Any) -> bool:
    return function is aten.zero_.default or (function is aten.fill_.Scalar and arguments[1] == 0)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the memory between the first and the last element of each has bytes in common."""
    if not one.numel() or not other.numel():
        return False
    (start, end), (other_start, other_end) = (
        (each.data_ptr(), each.data_ptr() + span(each.shape, each.stride()) * each.itemsize) for each in (one, other)
    )
    return start < other_end and other_start < end


def storage(tensor: torch.Tensor) -> int:
    """Return the address of the memory that a tensor is a view of; -1 where it has none."""
    return -1 if tensor.device.type == "meta" else tensor.untyped_storage().data_ptr()


def _written(function: Any, arguments: Any, keywords: Any) -> list[torch.Tensor]:
    """Return the tensors that the operation writes into."""
    return _tensors(
        [
            arguments[place] if place < len(arguments) else keywords.get(value.name)
            for place, value in enumerate(function._schema.arguments)
            if value.alias_info is not None and value.alias_info.is_write
        ]
    )


def _is_view(function: Any) -> bool:
    """Return whether the operation returns aliases of what it was given, and writes nothing."""
    schema = function._schema
    aliases = schema.returns and all(value.alias_info is not None for value in schema.returns)
    return bool(aliases) and not schema.is_mutable
