"""Whatever is written inside UndoneWrites is there again as it was, to the last bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from harness.weights.traced.undo import UndoneWrites


class Holder(nn.Module):
    """A parameter, a buffer, a plain tensor, a list of tensors, and a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3), requires_grad=False)
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
        self.absorbed = torch.ones(3)
        self.several = [torch.zeros(2), torch.ones(2)]
        self.inner = nn.Linear(2, 2)
        self.count = 1


def bits(model: Holder) -> list[bytes]:
    tensors = [*model.state_dict().values(), model.scale, model.absorbed, *model.several]
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


def in_place(model: Holder) -> None:
    model.weight[0] = float("nan")
    model.weight.T.mul_(3)
    model.scale.add_(1)
    model.several[1].zero_()
    torch._foreach_zero_([model.absorbed, model.several[0]])


def by_another_tensor(model: Holder) -> None:
    model.absorbed = torch.zeros(4)
    model.scale = torch.zeros(3)
    model.weight = nn.Parameter(torch.zeros(1), requires_grad=False)


def by_other_memory(model: Holder) -> None:
    model.weight.data = torch.zeros(5)
    model.inner.weight.data = model.inner.weight.data.T


def with_new_members(model: Holder) -> None:
    model.late = torch.zeros(3)
    model.register_buffer("later", torch.zeros(3))
    model.count = 7
    del model.absorbed


WRITES = [in_place, by_another_tensor, by_other_memory, with_new_members]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("fails", [False, True], ids=["ends", "raises"])
@torch.no_grad()
def test_a_write_is_taken_back(write: Callable[[Holder], None], fails: bool) -> None:
    model = Holder()
    before, members = bits(model), set(vars(model))
    objects = (model.weight, model.scale, model.absorbed, model.inner.weight)
    try:
        with UndoneWrites(model):
            write(model)
            if fails:
                raise KeyError("half way")
    except KeyError:
        assert fails
    assert bits(model) == before and set(vars(model)) == members and model.count == 1
    now = (model.weight, model.scale, model.absorbed, model.inner.weight)
    assert all(one is other for one, other in zip(objects, now, strict=True))
    assert list(model._buffers) == ["scale"]


@torch.no_grad()
def test_what_changed_is_counted_by_element_and_what_was_written_alike_counts_as_compared() -> None:
    model = Holder()
    with UndoneWrites(model) as undone:
        model.weight.copy_(model.weight.clone())
        model.scale[1] = 5
        model.absorbed = torch.ones(3)
        made: Any = torch.zeros(4)
        made += 1
        assert undone.changed() == {"weight": (0, 6), "scale": (1, 3), "absorbed": (0, 3)}
    with UndoneWrites(model) as undone:
        model.absorbed = torch.zeros(4)
        model.weight[0, 0] = -0.0
        assert undone.changed() == {"weight": (1, 6), "absorbed": (4, 4)}  # -0.0 is not 0.0
