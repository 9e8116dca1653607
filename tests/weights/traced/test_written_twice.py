"""Copies of two names that fill the same elements of one tensor."""

import torch

from harness.weights.tensor_view import TensorView
from harness.weights.traced.loader_trace import Copy, written_twice


def copy(target: torch.Tensor, name: str) -> Copy:
    source = TensorView(
        name=name,
        of=name,
        dtype=target.dtype,
        shape=tuple(target.shape),
        stride=tuple(torch.empty(target.shape).stride()),
    )
    return Copy(target, source)


def pairs(*copies: Copy) -> list[tuple[str, str]]:
    return [(first.source.name, second.source.name) for first, second in written_twice(copies)]


def test_parts_of_one_tensor_side_by_side_are_no_overlap() -> None:
    fused = torch.empty(6, 4)
    assert pairs(copy(fused[:3], "gate"), copy(fused[3:], "up")) == []
    assert pairs(copy(fused[:, :2], "left"), copy(fused[:, 2:], "right")) == []


def test_overlapping_parts_are_given_in_the_order_of_the_copies() -> None:
    fused = torch.empty(6, 4)
    assert pairs(copy(fused[2:], "late"), copy(fused[:3], "early")) == [("late", "early")]


def test_a_loader_that_copies_one_name_twice_is_no_overlap() -> None:
    weight = torch.empty(4)
    assert pairs(copy(weight, "norm"), copy(weight, "norm")) == []


def test_one_scale_that_two_fused_weights_bring_is_no_overlap() -> None:
    scales = torch.empty(8)
    assert pairs(copy(scales[3], "experts.3.w1.input_scale"), copy(scales[3], "experts.3.w3.input_scale")) == []
