"""Every element that a loader copies is filled once, from the right place, however the trainer is cut."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.trainer.rows import RowShards
from harness.weights.regions import Cut, cut_by_rows, regions


@st.composite
def copies(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """(view of a whole live tensor, view of an engine's tensor, ranks): a box of some axes, in any order, narrowed."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    live = np.arange(np.prod(shape)).reshape(shape)
    box = tuple(slice(start := draw(st.integers(0, size - 1)), draw(st.integers(start + 1, size))) for size in shape)
    source = live[box].transpose(draw(st.permutations(range(len(shape)))))
    # The target is a part of a larger tensor, as a fused or padded parameter is, in its own order of axes.
    order = draw(st.permutations(range(source.ndim)))
    room = [size + draw(st.integers(0, 2)) for size in (source.shape[axis] for axis in order)]
    target = np.full(room, -1)[tuple(slice(0, source.shape[axis]) for axis in order)]
    return source, target.transpose(np.argsort(order)), draw(st.integers(1, 5))


@settings(max_examples=100, deadline=None)
@given(copies())
def test_each_element_is_filled_once_from_its_place(drawn: tuple[np.ndarray, np.ndarray, int]) -> None:
    source, target, ranks = drawn
    live = source
    while live.base is not None:
        live = live.base
    whole = live.reshape(-1)
    rows = max(size for size in range(1, 8) if whole.size % size == 0)
    cuts = cut_by_rows(RowShards(rows, whole.size // rows, ranks), range(ranks))
    offset = int(source.reshape(-1)[0])
    found = list(
        regions(offset, source.shape, [s // 8 for s in source.strides], [s // 8 for s in target.strides], cuts)
    )
    flat = np.full(sum((n - 1) * s // 8 for n, s in zip(target.shape, target.strides, strict=True)) + 1, -1)
    starts = {cut.owner: cut.start for cut in cuts}
    stops = {cut.owner: cut.stop for cut in cuts}
    writes = 0
    for region in found:
        for index in np.ndindex(*[size for size, _, _ in region.axes]):
            at = region.target + sum(i * axis[2] for i, axis in zip(index, region.axes, strict=True))
            place = (
                starts[region.owner]
                + region.source
                + sum(i * axis[1] for i, axis in zip(index, region.axes, strict=True))
            )
            assert place < stops[region.owner] and flat[at] == -1
            flat[at], writes = whole[place], writes + 1
    assert writes == source.size
    filled = np.lib.stride_tricks.as_strided(flat, target.shape, target.strides)
    assert (filled == source).all()


def test_regions_are_as_few_and_as_long_as_can_be() -> None:
    (only,) = regions(0, (4, 8), (8, 1), (8, 1), cut_by_rows(RowShards(16, 8, 4), range(4)))
    assert only.axes == ((32, 1, 1),) and (only.owner, only.source, only.target) == (0, 0, 0)
    columns = list(regions(2, (6, 2), (8, 1), (2, 1), cut_by_rows(RowShards(6, 8, 3), range(3))))
    assert [(each.owner, each.source, each.target) for each in columns] == [(0, 2, 0), (1, 2, 4), (2, 2, 8)]
    assert {each.axes for each in columns} == {((2, 8, 2), (2, 1, 1))}, "one box for each rank"
    ranks = 2 * sys.getrecursionlimit()  # a tensor may have more cuts than Python has stack
    found = regions(0, (ranks, 8), (16, 1), (8, 1), cut_by_rows(RowShards(ranks, 16, ranks), range(ranks)))
    assert [each.owner for each in found] == list(range(ranks))


def test_cuts_name_the_owners_of_rows_and_leave_out_ranks_without_any() -> None:
    cuts = cut_by_rows(RowShards(5, 2, 4), [4, 5, 6, 7])
    assert cuts == (Cut(4, 0, 4), Cut(5, 4, 8), Cut(6, 8, 10))


def test_an_element_behind_the_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="element 12"):
        list(regions(0, (13,), (1,), (1,), cut_by_rows(RowShards(6, 2, 2), range(2))))
