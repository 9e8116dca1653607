"""Target and draft of a scheduler as one model."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from harness.rollout.served_models import ServedModels, models_in, role_of, serve_together


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(2))
        self.layer = nn.Parameter(torch.zeros(2))
        self.derived = 0

    def load_weights(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            if name in ("embed", "layer"):
                self.get_parameter(name).data.copy_(tensor)

    def post_load_weights(self) -> None:
        self.derived += 1


class TargetNextN(nn.Module):
    """Named as SGLang names a draft's class."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.embed = target.embed
        self.mtp = nn.Parameter(torch.zeros(2))

    def load_weights(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            if name == "mtp":
                self.mtp.data.copy_(tensor)


@pytest.fixture
def models() -> tuple[Target, TargetNextN]:
    target = Target()
    return target, TargetNextN(target)


def test_the_order_in_which_sglang_shows_them_does_not_matter(models: tuple[Target, TargetNextN]) -> None:
    served = serve_together(models)
    assert isinstance(served, ServedModels) and (served.target, served.draft) == models == models_in(served)
    assert serve_together(models[::-1]) is served, "checks keep what they know on it"
    assert serve_together([models[0]]) is models[0]
    with pytest.raises(ValueError, match="one target and one draft .* got Target, Target"):
        serve_together([models[0], Target()])


def test_names_have_the_role_and_what_both_hold_is_there_once(models: tuple[Target, TargetNextN]) -> None:
    served = serve_together(models)
    assert [name for name, _ in served.named_parameters()] == ["target.embed", "target.layer", "draft.mtp"]
    assert [role_of(name) for name in ("target.embed", "draft.mtp", "model.layers.0")] == ["target", "draft", "target"]
    models[1].embed = nn.Parameter(torch.zeros(2))
    assert "draft.embed" in dict(served.named_parameters()), "one of its own shows"


def test_each_loads_what_it_knows_and_derives_what_it_derives(models: tuple[Target, TargetNextN]) -> None:
    served = serve_together(models)
    served.load_weights((name, torch.full((2,), value)) for name, value in (("layer", 1.0), ("mtp", 2.0)))
    served.post_load_weights()
    assert models[0].layer.tolist() == [1, 1] and models[1].mtp.tolist() == [2, 2] and models[0].derived == 1
