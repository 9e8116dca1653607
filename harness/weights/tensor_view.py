"""TensorView: the one record of "some elements of a tensor", used from the checkpoint's names to the engine's
parameters.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""In a tensor's name: the number of a layer or of an expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorView:
    """A strided view of one tensor, as torch.as_strided describes it.

    Every number counts elements of `dtype`. The tensor that the view lies in depends on who holds the record:

    - in a layout, and in what an engine's loader reads: the tensor `of` of the trainer, as it is sent (Converter);
    - in a bucket: the bucket's buffer.
    """

    name: str
    """The checkpoint tensor that the elements belong to."""
    of: str
    """The tensor that they lie in, or came from."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    """Elements before the first one."""

    @classmethod
    def whole(cls, name: str, dtype: torch.dtype, shape: Sequence[int], of: str = "") -> "TensorView":
        """Return all of a contiguous tensor. of: "" if it lies in a tensor of its own name."""
        stride = tuple(torch.empty(tuple(shape), device="meta").stride())
        return cls(name=name, of=of or name, dtype=dtype, shape=tuple(shape), stride=stride)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """(stride, size) of the axes along which different elements lie, by stride: equal for views of the same
        elements.
        """
        axes = zip(self.stride, self.shape, strict=True)
        return tuple(sorted((stride, size) for stride, size in axes if size != 1 and (stride or not size)))

    def at(self, offset: int) -> "TensorView":
        """Return the same view, beginning elsewhere."""
        return replace(self, offset=offset)

    def holds(self, element: int) -> bool:
        """Return whether the view has that element. The strides must nest, as those of slices and transposes do."""
        left = element - self.offset
        for stride, size in sorted(zip(self.stride, self.shape, strict=True), reverse=True):
            left -= max(0, min(left // stride, size - 1)) * stride if stride else 0
        return left == 0

    def in_memory(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the elements, without a copy. memory: contiguous, of `dtype`, or a buffer of bytes (uint8)."""
        typed = memory if memory.dtype == self.dtype else memory.view(self.dtype)
        return typed.as_strided(self.shape, self.stride, typed.storage_offset() + self.offset)


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first of a strided view to its last, both included."""
    return sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1


def loses_precision(sent: torch.dtype, held: torch.dtype) -> bool:
    """Return whether a copy from one dtype to the other may change a value."""
    if sent == held:
        return False
    if any(each.is_floating_point and each.itemsize == 1 for each in (sent, held)):  # torch promotes no 8-bit floats
        return not (held.is_floating_point and held.itemsize > sent.itemsize)
    return torch.promote_types(sent, held) != held


def without_numbers(name: str) -> str:
    """Return what tensors of other layers and other experts have in common in their names."""
    return NUMBER.sub("*", name)
