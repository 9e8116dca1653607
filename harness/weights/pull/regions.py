"""The plan of a pull: which elements of which trainer rank's shard go where in a scheduler's parameter.

A loader's copy reads elements of one live tensor, in strides, and writes them, in strides, into one tensor of the engine.
FSDP2 has cut the live tensor into runs of rows. A region is what such a copy reads of one rank's run.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Axis = tuple[int, int, int]
"""(size, source stride, target stride)."""


@dataclass(frozen=True, slots=True)
class Region:
    """Elements that lie in strides on both sides; offsets and strides in elements of the side's own dtype."""

    owner: int
    """The trainer rank that holds the source."""
    source: int
    """From the first element of the owner's shard."""
    target: int
    """From the first element of the engine's tensor that the copy writes."""
    axes: tuple[Axis, ...]
    """As `merged` gives them."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A run of elements of a live tensor, counted as it lies whole and contiguous, on one trainer rank."""

    owner: int
    start: int
    stop: int


def cut_by_rows(rows: int, row_elements: int, ranks: int) -> tuple[Cut, ...]:
    """Return the cuts of FSDP2's Shard(0): chunks of ceil(rows / ranks) rows, the last ones shorter or empty."""
    chunk = -(-rows // ranks)
    edges = [min(rank * chunk, rows) * row_elements for rank in range(ranks + 1)]
    return tuple(Cut(rank, edges[rank], edges[rank + 1]) for rank in range(ranks) if edges[rank] < edges[rank + 1])


def regions(
    offset: int, shape: Sequence[int], stride: Sequence[int], target_stride: Sequence[int], cuts: Sequence[Cut]
) -> Iterator[Region]:
    """Yield what a copy reads of each cut: together every element of it, each once.

    offset, stride: of the source inside the whole live tensor; target_stride: of the tensor that is written. cuts: of the
    live tensor, in order. Raise ValueError where an element is in no cut.
    """
    if 0 in shape:
        return
    yield from _split(offset, 0, merged(zip(shape, stride, target_stride, strict=True)), cuts)


def _split(offset: int, target: int, axes: tuple[Axis, ...], cuts: Sequence[Cut]) -> Iterator[Region]:
    cut = next((each for each in cuts if each.start <= offset < each.stop), None)
    if cut is None:
        raise ValueError(
            f"the source must lie within the live tensor of {cuts[-1].stop} elements, got element {offset}"
        )
    if offset + _span(axes) < cut.stop:
        yield Region(cut.owner, offset - cut.start, target, axes)
        return
    # Along the longest step: the slices that end before the cut does, the one that crosses its end, and the rest.
    at = max(range(len(axes)), key=lambda place: axes[place][1])
    size, step, target_step = axes[at]
    others = (*axes[:at], *axes[at + 1 :])
    inside = max(0, (cut.stop - 1 - offset - _span(others)) // step + 1)
    if inside:
        yield Region(
            cut.owner, offset - cut.start, target, merged([*axes[:at], (inside, step, target_step), *axes[at + 1 :]])
        )
    else:
        inside = 1
        yield from _split(offset, target, others, cuts)
    if inside < size:
        rest = merged([*axes[:at], (size - inside, step, target_step), *axes[at + 1 :]])
        yield from _split(offset + inside * step, target + inside * target_step, rest, cuts)


def _span(axes: Sequence[Axis]) -> int:
    """Return how far behind the first element the last one lies in the source."""
    return sum((size - 1) * step for size, step, _ in axes)


def merged(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Return the axes by target stride, largest first; without sizes of 1, and neighbours that one can stand for as one."""
    found: list[Axis] = []
    for size, step, target_step in sorted(axes, key=lambda axis: -axis[2]):
        if size == 1:
            continue
        if found and found[-1][1:] == (size * step, size * target_step):
            found[-1] = (found[-1][0] * size, step, target_step)
        else:
            found.append((size, step, target_step))
    return tuple(found)
