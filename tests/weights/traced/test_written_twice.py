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


def test_only_copies_of_several_names_that_share_elements_overlap() -> None:
    fused, weight, scales = torch.empty(6, 4), torch.empty(4), torch.empty(8)
    assert pairs(copy(fused[:3], "gate"), copy(fused[3:], "up")) == []
    assert pairs(copy(fused[:, :2], "left"), copy(fused[:, 2:], "right")) == []
    assert pairs(copy(fused[2:], "late"), copy(fused[:3], "early")) == [("late", "early")], "in this order"
    assert pairs(copy(weight, "norm"), copy(weight, "norm")) == [], "a loader may copy one name twice"
    # Two fused weights may bring one scale.
    assert pairs(copy(scales[3], "experts.3.w1.input_scale"), copy(scales[3], "experts.3.w3.input_scale")) == []
