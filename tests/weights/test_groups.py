"""Checkpoint tensors, and what a loader reads of them, as strided views of a buffer."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.weights.groups import FusingGroup, LiveSpan, PlacedTensor, SourceView

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8])
BUFFER = torch.arange(4096, dtype=torch.int64).view(torch.uint8)[: 4096 * 8 - 3]  # no whole number of elements


def strided(shape: list[int], order: list[int], start: int, dtype: torch.dtype) -> torch.Tensor:
    whole = BUFFER[: BUFFER.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    dense = whole[start : start + torch.Size(shape).numel()].view(shape)
    return dense.permute([axis for axis in order if axis < len(shape)])


@given(st.lists(st.integers(0, 5), max_size=3), st.permutations(range(3)), st.integers(0, 7), DTYPES)
def test_a_tensor_in_a_buffer_is_the_strided_view_that_torch_would_give(
    shape: list[int], order: list[int], start: int, dtype: torch.dtype
) -> None:
    view = strided(shape, order, start, dtype)
    size, stride = tuple(view.shape), tuple(view.stride())
    entry = PlacedTensor(name="any", dtype=dtype, shape=size, stride=stride, offset=start * dtype.itemsize)
    source = SourceView("any", dtype, size, stride, start, target_dtype=dtype)
    assert entry.numel == view.numel() and entry.nbytes == view.numel() * dtype.itemsize
    for found in (entry.view(BUFFER), source.view(BUFFER)):
        assert torch.equal(found, view)
        assert found.untyped_storage().data_ptr() == BUFFER.untyped_storage().data_ptr()
    assert replace(entry, offset=0).view(BUFFER).shape == view.shape


@given(st.lists(st.integers(1, 5), max_size=3), st.permutations(range(3)), st.permutations(range(3)))
def test_two_views_of_the_same_elements_have_the_same_steps(shape: list[int], one: list[int], other: list[int]) -> None:
    views = [strided(shape, order, 0, torch.float32) for order in (one, other)]
    sources = [
        SourceView("a", each.dtype, (*each.shape, 1), (*each.stride(), 9), 0, target_dtype=each.dtype) for each in views
    ]
    assert sources[0].steps == sources[1].steps
    assert all(size > 1 for _, size in sources[0].steps)


def test_a_broadcast_axis_is_no_step_and_an_empty_one_is() -> None:
    assert SourceView("a", torch.float32, (4, 3), (0, 2), 0, target_dtype=torch.float32).steps == ((2, 3),)
    assert SourceView("a", torch.float32, (0, 3), (0, 2), 0, target_dtype=torch.float32).steps == ((0, 0), (2, 3))


def test_the_live_tensor_that_holds_a_byte() -> None:
    first = LiveSpan(live_name="first", offset=0, numel=10, dtype=torch.float32)
    second = LiveSpan(live_name="second", offset=256, numel=4, dtype=torch.bfloat16)
    group = FusingGroup(spans=(first, second), entries=(), nbytes=512)
    assert [group.span_of(offset) for offset in (0, 39, 256, 263)] == [first, first, second, second]
