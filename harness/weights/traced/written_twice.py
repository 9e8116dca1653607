"""Find names that fill the same elements of the engine.

Which of them stays there would depend on the order of sending.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch

from harness.weights.tensor_view import span
from harness.weights.traced.loader_trace import Copy, overlap
from harness.weights.traced.undo import address, storage


def written_twice(copies: Iterable[Copy]) -> Iterator[tuple[Copy, Copy]]:
    """Yield two copies, in the order in which they are made, for each pair of names that fill the same elements.

    Single numbers are left out, because SGLang keeps one scale for two fused weights, and both of them bring it.
    """
    in_storage: dict[int, list[tuple[int, Copy]]] = defaultdict(list)
    for number, copy in enumerate(copies):
        in_storage[storage(copy.target)].append((number, copy))
    for members in in_storage.values():
        if len(members) < 2:
            continue
        reaching: list[tuple[int, int, Copy]] = []  # copies before that reach beyond where the next one begins
        for start, end, number, copy in sorted((_range(number, each) for number, each in members), key=_place):
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


def _place(found: tuple[int, int, int, Copy]) -> tuple[int, int, int]:
    return found[:3]


def _reach(target: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to its last, both included."""
    if not target.numel():
        return 0
    return target.nbytes if target.is_contiguous() else span(target.shape, target.stride()) * target.itemsize
