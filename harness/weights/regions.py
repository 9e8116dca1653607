"""Cut the copies of a loader: which elements of which trainer rank's shard go where in a scheduler's parameter.

A pull needs that, and so does launch/verify.py, which cuts a parameter into chunks and reads what each is made of.

A loader's copy reads elements of one of the trainer's tensors, in strides, and writes them, in strides, into one tensor
of the engine. FSDP2 has cut the trainer's tensor into runs of rows. A region is what such a copy reads of one rank's
run.

Here a copy reads columns 2 to 4 of a tensor of 6 rows and 5 columns, whose rows are on three ranks. It becomes three
regions, each with the axes (rows: size 2, step 5) and (columns: size 3, step 1):

    rank 0   . . x x x      region of rank 0: begins at element 2 of its shard
             . . x x x
    rank 1   . . x x x      region of rank 1
             . . x x x
    rank 2   . . x x x      region of rank 2
             . . x x x
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.trainer.rows import RowShards

Axis = tuple[int, int, int]
"""(size, source stride, target stride)."""


@dataclass(frozen=True, slots=True)
class Region:
    """Elements that lie in strides on both sides, counted in elements of each side's own dtype."""

    owner: int
    """The trainer rank that holds the source."""
    source: int
    """Where it begins, from the first element of the owner's shard."""
    target: int
    """Where it begins, from the first element that the copy writes."""
    axes: tuple[Axis, ...]
    """As `merged` gives them."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The run of a tensor's elements, from start to before stop, that one trainer rank holds."""

    owner: int
    start: int
    stop: int


def cut_by_rows(shards: RowShards, owners: Sequence[int]) -> tuple[Cut, ...]:
    """Return the cuts of a tensor's rows, without empty ones. owners: the trainer rank of each rank of its mesh."""
    found = []
    for rank, owner in enumerate(owners):
        rows = shards.rows_of(rank)
        if rows and shards.row_elements:
            found.append(Cut(owner, rows.start * shards.row_elements, rows.stop * shards.row_elements))
    return tuple(found)


def regions(
    offset: int, shape: Sequence[int], stride: Sequence[int], target_stride: Sequence[int], cuts: Sequence[Cut]
) -> Iterator[Region]:
    """Yield what a copy reads of each cut: together every element of it, each once.

    offset, stride: of the source inside the whole tensor; target_stride: of the tensor that is written. cuts: of the
    whole tensor, in order. Raise ValueError if an element is in no cut.
    """
    if 0 in shape:
        return
    yield from _split(offset, 0, merged(zip(shape, stride, target_stride, strict=True)), cuts)


def _split(offset: int, target: int, axes: tuple[Axis, ...], cuts: Sequence[Cut]) -> Iterator[Region]:
    """Yield the regions of a box that begins at `offset` of the source and at `target` of the engine's tensor.

    If the box reaches beyond the cut that it begins in, it is divided along its longest source step, into

        slices that lie wholly inside the cut                   one region
        or else the first slice, which crosses the cut's end    split by itself, along its other axes
        the remaining slices                                    come next: they begin in this cut or a later one
    """
    while True:
        cut = cuts[max(0, bisect_right(cuts, offset, key=lambda each: each.start) - 1)]
        if not cut.start <= offset < cut.stop:
            raise ValueError(f"the source must lie within the tensor of {cuts[-1].stop} elements, got element {offset}")
        if offset + _reach(axes) < cut.stop:
            yield Region(cut.owner, offset - cut.start, target, axes)
            return
        longest = max(range(len(axes)), key=lambda place: axes[place][1])
        size, step, target_step = axes[longest]
        before, behind = axes[:longest], axes[longest + 1 :]
        slice_axes = (*before, *behind)
        inside = max(0, (cut.stop - 1 - offset - _reach(slice_axes)) // step + 1)
        if inside:
            yield Region(cut.owner, offset - cut.start, target, merged([*before, (inside, step, target_step), *behind]))
        else:
            yield from _split(offset, target, slice_axes, cuts)
        done = max(inside, 1)
        if done == size:
            return
        # A loop, because a tensor of a thousand ranks has more cuts than Python's stack has room for.
        offset, target = offset + done * step, target + done * target_step
        axes = merged([*before, (size - done, step, target_step), *behind])


def _reach(axes: Sequence[Axis]) -> int:
    """Return how many elements behind the first one of the source the last one lies."""
    return sum((size - 1) * step for size, step, _ in axes)


def merged(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Return the axes by target stride, largest first, without axes of size 1.

    Neighbours that are one run on both sides become one axis: (2, 4, 4) and (4, 1, 1) are (8, 1, 1).
    """
    found: list[Axis] = []
    for size, step, target_step in sorted(axes, key=lambda axis: -axis[2]):
        if size == 1:
            continue
        if found and found[-1][1:] == (size * step, size * target_step):
            found[-1] = (found[-1][0] * size, step, target_step)
        else:
            found.append((size, step, target_step))
    return tuple(found)
