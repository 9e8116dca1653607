"""Run code that writes into a model, look at what it left, and take every write back.

A check runs the engine's own loader to learn what it would do. The engine must hold afterwards, to the last bit, what
it held before.
"""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.weights.traced.model_state import INTEGER, model_tensors

Place = tuple[dict[str, Any], str]
"""A module's parameters, buffers or attributes, and the name in there."""


class UndoneWrites:
    """Take back, at the end, what the code inside writes into tensors that existed before, and what modules hold.

    Only writes by torch operators are seen, not those of a kernel that is launched directly, or through numpy.
    """

    def __init__(self, model: Any) -> None:
        """Note what the modules hold. The guard may be entered again and again, since each exit brings that back."""
        self.model = model
        self.saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """Address of a storage that was written -> that storage, and a copy of what it held."""
        self._made: set[int] = set()
        self._held = [(members, dict(members)) for members in _members(model)]
        tensors = [each for _, held in self._held for each in held.values() if isinstance(each, torch.Tensor)]
        self._data = [(tensor, tensor.data, _place(tensor)) for tensor in tensors]
        self._names = {name: tensor.data for name, tensor in model_tensors(model).items()}
        self._watch = _Watch(self)

    def __enter__(self) -> "UndoneWrites":
        self.begin()
        self._watch.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._watch.__exit__(*failure)
        self.restore()

    @contextmanager
    def told(self) -> Iterator[None]:
        """Take back, after this block, what was run through `run` in it.

        For a caller that has a dispatch mode of its own: a nested mode would double the cost.
        """
        self.begin()
        try:
            yield
        finally:
            self.restore()

    def begin(self) -> None:
        self.saved.clear()
        self._made.clear()

    def restore(self) -> None:
        """Restore what modules and tensors held."""
        for members, held in self._held:
            if not _are_same(members, held):
                _put_back(members, held)
        for tensor, data, place in self._data:
            if _place(tensor) != place:
                tensor.data = data
        for memory, before in self.saved.values():
            memory.copy_(before)

    def run(self, function: Any, arguments: Any, keywords: Any) -> Any:
        """Run an operator, and keep what the tensors held that it writes into."""
        if is_view(function):
            return function(*arguments, **keywords)
        for tensor in written(function, arguments, keywords):
            self._save(tensor)
        result = function(*arguments, **keywords)
        given = {storage(tensor) for tensor in tensors_in((arguments, keywords))}
        self._made |= {storage(tensor) for tensor in tensors_in(result)} - given
        return result

    def _save(self, tensor: torch.Tensor) -> None:
        address = storage(tensor)
        if address not in self._made and address not in self.saved and not tensor.is_meta:
            memory = tensor.untyped_storage()
            self.saved[address] = memory, memory.clone()

    def replaced(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield (name, tensor before, tensor now) where a module now has another tensor, or the tensor other memory."""
        if self._holds_the_same and all(_place(tensor) == place for tensor, _, place in self._data):
            return  # to walk over all modules of a large model takes longer than what is traced
        for name, now in model_tensors(self.model).items():
            before = self._names.get(name)
            if before is not None and _place(before) != _place(now):
                yield name, before, now.data

    def removed(self) -> list[str]:
        """Return the names of tensors that the model had before, and has under no name now."""
        if self._holds_the_same:
            return []
        now = model_tensors(self.model)
        return [name for name in self._names if name not in now]

    @property
    def _holds_the_same(self) -> bool:
        """Whether all modules hold the very members that they held before."""
        return all(_are_same(members, held) for members, held in self._held)

    def changed(self) -> dict[str, tuple[int, int]]:
        """Return name -> (elements that now differ in any bit from before, all elements), for what was written or
        replaced.

        Names that the model did not have before are left out: SGLang makes some when it first needs them.
        """
        found = {}
        for name, now in model_tensors(self.model).items():
            before = self._names.get(name)
            if before is None or (storage(before) not in self.saved and _place(before) == _place(now)):
                continue
            found[name] = differing_elements(self._before(before), now), now.numel()
        return found

    def _before(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a tensor held, whether it was written since or not."""
        if storage(tensor) not in self.saved:
            return tensor
        _, copy = self.saved[storage(tensor)]
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())


class _Watch(TorchDispatchMode):
    """Show every operator to a guard."""

    def __init__(self, guard: UndoneWrites) -> None:
        super().__init__()
        self.guard = guard

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], arguments: Any = (), keywords: Any = None
    ) -> Any:
        return self.guard.run(function, arguments, keywords or {})


def differing_elements(one: torch.Tensor, other: torch.Tensor) -> int:
    """Return how many elements differ in any bit; all of them if shapes or dtypes do."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return other.numel()
    if one.device != other.device:
        one = one.to(other.device)
    if one.dtype not in INTEGER.values() and one.itemsize in INTEGER:
        integer = INTEGER[one.itemsize]
        one, other = one.detach().view(integer), other.detach().view(integer)
    return int((one != other).sum())


def _members(model: Any) -> Iterator[dict[str, Any]]:
    """Yield the attributes, parameters, buffers and submodules of every module of the model."""
    for module in model.modules():
        yield from (vars(module), module._parameters, module._buffers, module._modules)


def _are_same(members: dict[str, Any], held: dict[str, Any]) -> bool:
    """Return whether the members are the very objects that were held, in their order."""
    return (
        len(members) == len(held)
        and all(map(operator.is_, members.values(), held.values()))
        and all(map(operator.eq, members, held))
    )


def _put_back(members: dict[str, Any], held: dict[str, Any]) -> None:
    """Make the members what they were.

    The scheduler's own thread may be reading the others, so only what differs is set.
    """
    for name in [name for name in members if name not in held]:
        del members[name]
    members.update({name: value for name, value in held.items() if members.get(name, members) is not value})


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return address(tensor), tensor.shape, tensor.stride(), tensor.dtype


def storage(tensor: torch.Tensor) -> int:
    """Return the address of the memory that a tensor is a view of; of its storage object for a meta tensor, which has
    none.
    """
    memory = tensor.untyped_storage()
    return int(memory._cdata) if tensor.is_meta else memory.data_ptr()


def address(tensor: torch.Tensor) -> int:
    """Return the address of the first element. Those of meta tensors may be compared within one storage only."""
    if not tensor.is_meta:
        return tensor.data_ptr()
    return storage(tensor) + int(tensor.storage_offset()) * tensor.itemsize


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of an operator's arguments or results. torch's own tree_leaves takes several times as long."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [tensor for each in tree for tensor in tensors_in(each)]


def written(function: Any, arguments: Any, keywords: Any) -> list[torch.Tensor]:
    """Return the tensors that an operator writes into."""
    places = _places_written(function)
    return tensors_in([arguments[place] if place < len(arguments) else keywords.get(name) for place, name in places])


@cache
def _places_written(function: Any) -> tuple[tuple[int, str], ...]:
    """Return the position and the name of each argument that an operator writes into."""
    return tuple(
        (place, value.name)
        for place, value in enumerate(function._schema.arguments)
        if value.alias_info is not None and value.alias_info.is_write
    )


@cache
def is_view(function: Any) -> bool:
    """Return whether the operation returns views of its arguments, and writes nothing."""
    schema = function._schema
    aliases = schema.returns and all(value.alias_info is not None for value in schema.returns)
    return bool(aliases) and not schema.is_mutable
