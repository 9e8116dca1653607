"""Dry-run a model's load_weights under a TorchDispatchMode and record what it copies where.

The loader gets views of memory that is never touched. Each copy from there into the model, and each zero of a padding, is
recorded instead of made. So the engine itself says which of its elements a tensor fills, which names it ignores, and with
which tensors it does more than copy.
"""

import concurrent.futures
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.weights.tensor_view import TensorView, span

aten = torch.ops.aten
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
    used: set[str] = field(default_factory=set)
    """Names of which at least one element was read."""
    opaque: set[str] = field(default_factory=set)
    """Names that went through an operation that is not followed."""
    does_more: bool = False
    """The loader computed something besides copying: it must run itself."""
    error: str = ""

    @property
    def only_copies(self) -> bool:
        """Whether the zeros and copies alone are the whole load."""
        return not (self.error or self.does_more or self.opaque)


def trace_loader(
    load: Callable[[list[tuple[str, torch.Tensor]]], Any],
    views: Sequence[TensorView],
    memory: Mapping[str, torch.Tensor],
) -> GroupTrace:
    """Run `load`, the load_weights of a model, on the tensors of one group without changing what they fill.

    memory: a contiguous tensor for each `of` of the views. What a loader derives from weights that it holds, such as
    DeepSeek's absorbed projections, it derives anew.
    """
    traced = GroupTrace(tuple(views))
    recorder = _Recorder(memory, traced)
    # A dispatch mode only sees its own thread.
    inline = patch.object(concurrent.futures, "ThreadPoolExecutor", _InlineExecutor)
    try:
        with torch.no_grad(), inline, recorder:
            load([(view.name, view.in_memory(memory[view.of])) for view in views])
    except Exception as error:  # asserts, shape errors, KeyErrors: whatever the loader of an architecture raises
        traced.error = f"{type(error).__name__}: {error}".strip()
    with torch.no_grad():
        for tensor, before in reversed(recorder.undone):
            tensor.copy_(before)
    return traced


class _Recorder(TorchDispatchMode):
    """Record copies out of the memory, and zeros, instead of making them. All other operations run."""

    def __init__(self, memory: Mapping[str, torch.Tensor], traced: GroupTrace) -> None:
        super().__init__()
        self.sent = {storage(tensor): of for of, tensor in memory.items()}
        """Address of the memory -> the tensor that it stands for."""
        self.traced = traced
        in_order = sorted(traced.views, key=lambda view: view.offset)
        self.views = {of: [view for view in in_order if view.of == of] for of in memory}
        self.moved: dict[int, tuple[torch.Tensor, Pieces]] = {}
        """Tensors made of elements of the memory, such as the cat of two halves, by address of their storage."""
        self.made: dict[int, torch.Tensor] = {}
        """Tensors that the loader made itself, by address of their storage; kept so that no address is used again."""
        self.tainted: dict[int, set[str]] = {}
        """Address of a storage -> names whose elements went into it in a way that is not followed."""
        self.escaped = False
        """A value became a Python number: whatever is written afterwards may come from it."""
        self.undone: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tensors that were overwritten with something that came from the memory, and a copy of what they held."""

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        tensors = _tensors((arguments, keywords))
        sources = [each for each in tensors if storage(each) in self.sent or storage(each) in self.moved]
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
        if pieces and all(storage(source) in self.sent for _, source in pieces):
            self.moved[storage(result)] = result, pieces
        else:
            self.traced.opaque |= names
            for tensor in (*results, *written):
                self._taint(tensor, names)
            self.escaped |= function is aten._local_scalar_dense.default
        return result

    def _of_the_model(self, tensor: torch.Tensor) -> bool:
        return storage(tensor) not in self.sent and storage(tensor) not in self.made

    def _record_zeros(self, target: torch.Tensor) -> None:
        """Note a part that is set to zero. Zeros on top of a copy are left to the loader itself."""
        if any(_overlap(copy.target, target) for copy in self.traced.copies):
            self.traced.does_more = True
        elif target.numel():
            self.traced.zeros.append(target)

    def _taint(self, tensor: torch.Tensor, names: set[str]) -> None:
        if storage(tensor) in self.made:
            self.tainted.setdefault(storage(tensor), set()).update(names)

    def _record(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Note one copy. If its source was made by cat or clone, only the whole of it is followed, not a view of it."""
        names = self._names(source)
        self.traced.used |= names
        self._taint(target, names)  # it was not filled, so a tensor that it goes into next must not be kept
        moved = self.moved.get(storage(source))
        if moved and (_geometry(source), target.shape) != (_geometry(moved[0]), source.shape):
            self.traced.opaque |= names
            return
        pieces = moved[1] if moved else [(..., source.expand(target.shape))]
        for where, piece in pieces:
            part = target[where]
            read = TensorView(
                name=self._name(piece),
                of=self.sent[storage(piece)],
                dtype=piece.dtype,
                shape=tuple(part.shape),
                stride=tuple(piece.stride()),
                offset=int(piece.storage_offset()),
            )
            self.traced.copies.append(Copy(part, read))

    def _names(self, tensor: torch.Tensor) -> set[str]:
        _, pieces = self.moved.get(storage(tensor), (tensor, [(..., tensor)]))
        return {self._name(piece) for _, piece in pieces}

    def _name(self, piece: torch.Tensor) -> str:
        """Return the checkpoint tensor that the first element of a piece belongs to.

        Checkpoint tensors may lie side by side in one tensor, row by row, so the nearest one that begins before the
        element need not hold it.
        """
        views, element = self.views[self.sent[storage(piece)]], int(piece.storage_offset())
        last = bisect_right(views, element, key=lambda view: view.offset) - 1
        return next((view for view in reversed(views[: last + 1]) if view.holds(element)), views[last]).name


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


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _zeroes(function: Any, arguments: Any) -> bool:
    return function is aten.zero_.default or (function is aten.fill_.Scalar and arguments[1] == 0)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the ranges from first to last element overlap in memory."""
    if not one.numel() or not other.numel():
        return False
    (start, end), (other_start, other_end) = (
        (each.data_ptr(), each.data_ptr() + span(each.shape, each.stride()) * each.itemsize) for each in (one, other)
    )
    return start < other_end and other_start < end


def storage(tensor: torch.Tensor) -> int:
    """Return the address of the memory that a tensor is a view of; -1 for a meta tensor."""
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
    """Return whether the operation returns views of its arguments, and writes nothing."""
    schema = function._schema
    aliases = schema.returns and all(value.alias_info is not None for value in schema.returns)
    return bool(aliases) and not schema.is_mutable
