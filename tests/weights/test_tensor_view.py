"""Strided views of a buffer, and the groups of what fuses."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.weights.tensor_view import TensorView, loses_precision, span

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8])
BUFFER = torch.arange(4096, dtype=torch.int64).view(torch.uint8)


def strided(shape: list[int], order: list[int], start: int, dtype: torch.dtype) -> torch.Tensor:
    dense = BUFFER.view(dtype)[start : start + torch.Size(shape).numel()].view(shape)
    return dense.permute([axis for axis in order if axis < len(shape)])


def view_of(tensor: torch.Tensor, start: int) -> TensorView:
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return TensorView(name="any", of="buffer", dtype=tensor.dtype, shape=shape, stride=stride, offset=start)


@given(st.lists(st.integers(0, 5), max_size=3), st.permutations(range(3)), st.integers(0, 7), DTYPES)
def test_a_view_in_a_buffer_of_bytes_or_elements_is_what_torch_would_give(
    shape: list[int], order: list[int], start: int, dtype: torch.dtype
) -> None:
    tensor = strided(shape, order, start, dtype)
    view = view_of(tensor, start)
    assert view.numel == tensor.numel() and view.nbytes == tensor.numel() * dtype.itemsize
    for memory in (BUFFER, BUFFER.view(dtype)):
        found = view.in_memory(memory)
        assert torch.equal(found, tensor)
        assert found.untyped_storage().data_ptr() == BUFFER.untyped_storage().data_ptr()


@given(st.lists(st.integers(1, 5), max_size=3), st.permutations(range(3)), st.integers(0, 7))
def test_a_view_holds_its_own_elements_and_no_others(shape: list[int], order: list[int], start: int) -> None:
    view = view_of(strided(shape, order, start, torch.int64), start)
    own = set(view.in_memory(torch.arange(4096)).reshape(-1).tolist())
    around = range(max(0, start - 3), start + span(view.shape, view.stride) + 3)
    assert {element for element in around if view.holds(element)} == own


@given(st.lists(st.integers(1, 5), max_size=3), st.permutations(range(3)), st.permutations(range(3)))
def test_two_views_of_the_same_elements_have_the_same_steps(shape: list[int], one: list[int], other: list[int]) -> None:
    found = [view_of(strided(shape, order, 0, torch.float32)[..., None], 0) for order in (one, other)]
    assert found[0].steps == found[1].steps
    assert all(size > 1 for _, size in found[0].steps)


def test_a_broadcast_axis_is_no_step_and_an_empty_one_is() -> None:
    def view(shape: tuple[int, int]) -> TensorView:
        return TensorView(name="a", of="a", dtype=torch.float32, shape=shape, stride=(0, 2))

    assert view((4, 3)).steps == ((2, 3),)
    assert view((0, 3)).steps == ((0, 0), (2, 3))


def test_only_a_narrower_dtype_loses_precision() -> None:
    assert loses_precision(torch.float32, torch.bfloat16) and loses_precision(torch.bfloat16, torch.float16)
    assert not loses_precision(torch.bfloat16, torch.float32)
    assert loses_precision(torch.bfloat16, torch.float8_e4m3fn) and loses_precision(
        torch.float8_e5m2, torch.float8_e4m3fn
    )
    assert not loses_precision(torch.float8_e4m3fn, torch.bfloat16)
    assert not loses_precision(torch.float8_e4m3fn, torch.float8_e4m3fn)
