"""Run code that writes into a model, look at what it left, and take every write back.

A check runs the engine's own loader to learn what it would do. The engine must hold afterwards, to the last bit, what it held
before.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.weights.worker.model_state import INTEGER, model_tensors

Place = tuple[dict[str, Any], str]
"""A module's parameters, buffers or attributes, and the name in there."""


class UndoneWrites(TorchDispatchMode):
    """Take back, at the end, what the code inside writes into tensors that existed before, and what modules hold.

    Only writes by torch operators are seen, not those of a kernel that is launched directly, or through numpy.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """Address of a storage that was written -> that storage, and a copy of what it held."""
        self._made: set[int] = set()
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._data: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._names: dict[str, torch.Tensor] = {}

    def __enter__(self) -> "UndoneWrites":
        self._held = [(members, dict(members)) for members in _members(self.model)]
        tensors = [each for _, held in self._held for each in held.values() if isinstance(each, torch.Tensor)]
        self._data = [(tensor, tensor.data) for tensor in tensors]
        self._names = {name: tensor.data for name, tensor in model_tensors(self.model).items()}
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        for members, held in self._held:
            _put_back(members, held)
        for tensor, data in self._data:
            if _place(tensor) != _place(data):
                tensor.data = data
        for memory, before in self.saved.values():
            memory.copy_(before)

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        for tensor in written(function, arguments, keywords):
            self._save(tensor)
        result = function(*arguments, **keywords)
        given = {storage(tensor) for tensor in tensors_in((arguments, keywords))}
        self._made |= {storage(tensor) for tensor in tensors_in(result)} - given
        return result

    def _save(self, tensor: torch.Tensor) -> None:
        address = storage(tensor)
        if address not in self._made and address not in self.saved and tensor.device.type != "meta":
            memory = tensor.untyped_storage()
            self.saved[address] = memory, memory.clone()

    def replaced(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield (name, tensor before, tensor now) where a module now has another tensor, or the tensor other memory."""
        for name, now in model_tensors(self.model).items():
            before = self._names.get(name)
            if before is not None and _place(before) != _place(now):
                yield name, before, now.data

    def changed(self) -> dict[str, tuple[int, int]]:
        """Return name -> (elements that now differ in any bit from before, all elements), for what was written or replaced.

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


def _put_back(members: dict[str, Any], held: dict[str, Any]) -> None:
    """Make the members what they were. The scheduler's own thread may be reading the others, so only what differs is set."""
    for name in [name for name in members if name not in held]:
        del members[name]
    members.update({name: value for name, value in held.items() if members.get(name, members) is not value})


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tensor.data_ptr() if tensor.device.type != "meta" else id(tensor),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )


def storage(tensor: torch.Tensor) -> int:
    """Return the address of the memory that a tensor is a view of; -1 for a meta tensor."""
    return -1 if tensor.device.type == "meta" else tensor.untyped_storage().data_ptr()


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of an operator's arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def written(function: Any, arguments: Any, keywords: Any) -> list[torch.Tensor]:
    """Return the tensors that an operator writes into."""
    return tensors_in(
        [
            arguments[place] if place < len(arguments) else keywords.get(value.name)
            for place, value in enumerate(function._schema.arguments)
            if value.alias_info is not None and value.alias_info.is_write
        ]
    )
