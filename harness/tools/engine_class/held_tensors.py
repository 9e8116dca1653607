"""What each tensor of an engine's rank is made of, in numbers that outlive the rank's model: which elements of which
checkpoint tensors, and which zeros.
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import torch

from harness.weights.tensor_view import TensorView
from harness.weights.traced.rank_trace import LoaderTrace, begins_within, missing_elements
from harness.weights.traced.undo import storage


@dataclass(frozen=True, slots=True)
class Place:
    """Where elements lie in the memory of a tensor; all numbers count elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Place":
        return cls(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldTensor:
    """One parameter or buffer of a rank, as its loader fills it."""

    dtype: torch.dtype
    place: Place
    memory: int
    """Elements of the memory that it lies in."""
    copies: tuple[tuple[Place, TensorView], ...]
    """Where a copy goes, and what it reads of a checkpoint tensor; a later one overwrites an earlier one."""
    zeros: tuple[Place, ...]
    """What is zero before the copies."""
    missing: int
    """Elements that nothing fills."""
    computed: tuple[str, ...] = ()
    """The checkpoint names with which the loader computes something that goes here: their copies do not say what."""

    @property
    def is_known(self) -> bool:
        """Whether the copies and zeros say what every element is."""
        return not self.missing and not self.computed

    @property
    def sources(self) -> tuple[str, ...]:
        """The checkpoint tensors that fill it, each once."""
        return tuple(dict.fromkeys(source.name for _, source in self.copies))


def held_tensors(trace: LoaderTrace) -> dict[str, HeldTensor]:
    """Return the parameters and buffers that the traced loader fills, makes zero or computes, by the engine's name."""
    copies: dict[int, list[tuple[Place, TensorView]]] = defaultdict(list)
    zeros: dict[int, list[Place]] = defaultdict(list)
    computed: dict[int, set[str]] = defaultdict(set)
    parts: dict[int, list[torch.Tensor]] = defaultdict(list)
    for group in trace.traces:
        for copy in group.copies:
            copies[storage(copy.target)].append((Place.of(copy.target), copy.source))
        for part in group.zeros:
            zeros[storage(part)].append(Place.of(part))
        for part in group.computed:
            computed[storage(part)] |= group.opaque | group.computed_with | trace.derived_over
        for part in (*(copy.target for copy in group.copies), *group.zeros, *group.computed):
            parts[storage(part)].append(part)
    found = {}
    for name, tensor in _all_tensors(trace).items():
        memory = storage(tensor)
        own = [part for part in parts.get(memory, ()) if begins_within(part, tensor)]
        if not own:
            continue
        found[name] = HeldTensor(
            dtype=tensor.dtype,
            place=Place.of(tensor),
            memory=tensor.untyped_storage().nbytes() // tensor.itemsize,
            copies=tuple(copies.get(memory, ())),
            zeros=tuple(zeros.get(memory, ())),
            missing=missing_elements(tensor, own),
            computed=tuple(sorted(computed.get(memory, ()))) if memory in computed else (),
        )
    return found


def unfilled_tensors(trace: LoaderTrace, held: Collection[str]) -> list[str]:
    """Return the parameters and persistent buffers that the loader does nothing with."""
    passing = {
        f"{path}.{name}".removeprefix(".")
        for path, module in trace.model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return [name for name in _all_tensors(trace) if name not in held and name not in passing]


def _all_tensors(trace: LoaderTrace) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, each once, as SGLang's checker lists them."""
    return dict(trace.model.named_parameters()) | dict(trace.model.named_buffers())
