"""What fuses on arrival, as memory of its own: the live tensors of a group whole, side by side.

A copy that an engine's loader makes of such memory is a copy of a live tensor, wherever the trainer's ranks hold it.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from harness.weights.names import CheckpointTensor

ALIGNMENT = 256
"""Bytes; of what lies side by side in one buffer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedTensor:
    """One checkpoint tensor in a buffer (uint8, 1-D): a strided view."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    offset: int
    """Bytes from the first of the buffer to the first element of the tensor."""

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def holds(self, offset: int) -> bool:
        """Return whether an element begins at that byte of the buffer, for strides that nest."""
        left, inside = divmod(offset - self.offset, self.dtype.itemsize)
        for stride, size in sorted(zip(self.stride, self.shape, strict=True), reverse=True):
            left -= min(left // stride, size - 1) * stride if stride else 0
        return left == 0 and inside == 0

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor inside a buffer whose first byte is its storage's, without a copy."""
        return typed(buffer, self.dtype).as_strided(self.shape, self.stride, self.offset // self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class SourceView:
    """What of a group's memory one copy of the engine's loader reads, counted in elements of dtype."""

    name: str
    """The checkpoint tensor that the elements are of."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    target_dtype: torch.dtype
    """As the engine holds the elements."""

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """(stride, size) of the axes along which different elements lie, by stride."""
        axes = zip(self.stride, self.shape, strict=True)
        return tuple(sorted((stride, size) for stride, size in axes if size != 1 and (stride or not size)))

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the elements inside a group's memory, without a copy."""
        return typed(buffer, self.dtype).as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveSpan:
    """Where one live tensor lies, whole and contiguous, in the memory of its group."""

    live_name: str
    offset: int
    """Bytes."""
    numel: int
    dtype: torch.dtype
    """As it is sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FusingGroup:
    """Tensors that one call of the engine's loader must bring together, and the memory that would hold them."""

    spans: tuple[LiveSpan, ...]
    entries: tuple[PlacedTensor, ...]
    """The checkpoint tensors, views of that memory."""
    nbytes: int

    def span_of(self, offset: int) -> LiveSpan:
        """Return the live tensor that holds the byte at `offset`."""
        return self.spans[bisect_right(self.spans, offset, key=lambda span: span.offset) - 1]


def fusing_groups(layout: Iterable[CheckpointTensor], live: Mapping[str, torch.Tensor]) -> tuple[FusingGroup, ...]:
    """Return the groups in the order of the layout; within one, tensors by name.

    An engine that derives the fused name from the last half to arrive (0.4.6) expects kv_a before q_a.
    """
    members: dict[str, list[CheckpointTensor]] = {}
    for tensor in layout:
        members.setdefault(fusing_key(tensor), []).append(tensor)
    return tuple(_group(sorted(each, key=lambda tensor: tensor.name), live) for each in members.values())


def fusing_key(tensor: CheckpointTensor) -> str:
    """Return the live tensor for experts (an expert fuses within itself), else the module above the one that owns it."""
    if ".experts." in tensor.live_name:
        # An unfused expert is experts.3.gate_proj.weight: its own module, experts.3, is the group.
        path, _, rest = tensor.live_name.partition(".experts.")
        return f"{path}.experts.{rest.split('.')[0]}"
    return tensor.live_name.rsplit(".", 2)[0]


def typed(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a buffer (uint8, 1-D) as elements of dtype, as many as are whole."""
    return buffer[: buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Return where the next tensor may begin behind so many bytes."""
    return -(-nbytes // alignment) * alignment


def _group(tensors: list[CheckpointTensor], live: Mapping[str, torch.Tensor]) -> FusingGroup:
    spans: dict[str, LiveSpan] = {}
    filled = 0
    for tensor in tensors:
        name, numel = tensor.live_name, live[tensor.live_name].numel()
        if name not in spans:
            spans[name] = LiveSpan(live_name=name, offset=filled, numel=numel, dtype=tensor.dtype)
            filled += aligned(numel * tensor.dtype.itemsize)
    entries = tuple(
        PlacedTensor(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            stride=tensor.stride,
            offset=spans[tensor.live_name].offset + tensor.offset * tensor.dtype.itemsize,
        )
        for tensor in tensors
    )
    return FusingGroup(spans=tuple(spans.values()), entries=entries, nbytes=filled)
