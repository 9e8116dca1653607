"""Copies that modules keep of their weights: found while they are right, named once an update has left them behind."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.weights.worker.kept_copies import find_copies, stale_copies


class Router(nn.Module):
    """Keeps its weight in float32 from its first forward pass on, as SGLang's Glm4MoeGate did until 0.5.18."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16, dtype=torch.bfloat16))
        self.register_buffer("_weight_fp32", None, persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._weight_fp32 is None:
            self._weight_fp32 = self.weight.data.to(torch.float32)
        return nn.functional.linear(hidden.float(), self._weight_fp32)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), Router())


def update(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


def test_a_copy_that_an_update_does_not_reach_is_named_with_its_weight_until_it_is_made_anew() -> None:
    served = model()
    assert find_copies(served) == 0, "no forward pass has made it yet"
    served(torch.randn(2, 16))
    assert find_copies(served) == 1 and stale_copies(served) == {}
    update(served)
    assert stale_copies(served) == {"1._weight_fp32": "1.weight"}
    served[1]._weight_fp32 = None  # type: ignore[index]
    assert stale_copies(served) == {}
    served(torch.randn(2, 16))
    assert stale_copies(served) == {}


@pytest.mark.parametrize(
    "keep",
    [
        lambda router: router.register_buffer("view", router.weight.data),
        lambda router: router.register_buffer("other", torch.randn(8, 16)),
        lambda router: router.register_buffer("counts", torch.zeros(8, 16, dtype=torch.int64)),
        lambda router: setattr(router, "shorter", router.weight.detach()[:4].clone()),
    ],
)
def test_what_is_no_copy_is_not_taken_for_one(keep: Callable[[Router], object]) -> None:
    served = model()
    keep(served[1])  # type: ignore[index]
    find_copies(served)
    update(served)
    assert stale_copies(served) == {}


@dataclass(slots=True)
class Settings:
    """As SGLang's TopKConfig: beside the router, with a tensor that the router's owner keeps."""

    top_k: int = 2
    cached: Any = None


GLOBAL: dict[int, Any] = {}


@pytest.mark.parametrize(
    ("keep", "name"),
    [
        (lambda layer, copy: setattr(layer.gate, "kept", {"fp32": copy}), "layers.0.gate.kept['fp32']"),
        (lambda layer, copy: setattr(layer.topk, "settings", Settings(cached=copy)), "layers.0.topk.settings.cached"),
        (lambda layer, copy: setattr(layer.topk, "sibling", copy.flatten()), "layers.0.topk.sibling"),
        (lambda layer, copy: setattr(layer.topk, "op", SimpleNamespace(a=[{1: copy}])), "layers.0.topk.op.a[0][1]"),
        (lambda layer, copy: setattr(layer.gate.weight, "own", {"x": copy.half()}), None),
        (lambda layer, copy: GLOBAL.update({7: copy}), f"{__name__}.GLOBAL[7]"),
    ],
)
def test_a_copy_is_found_wherever_the_layer_or_a_global_variable_keeps_it(
    keep: Callable[[Any, torch.Tensor], object], name: str | None
) -> None:
    served: Any = nn.Module()
    served.layers = nn.ModuleList(
        nn.ModuleDict({"gate": Router(), "topk": nn.Identity()})
        for _ in range(2)  # alike, but other values
    )
    try:
        keep(served.layers[0], served.layers[0].gate.weight.detach().float())
        assert find_copies(served) == 1 and stale_copies(served) == {}
        update(served)
        assert stale_copies(served) == {name or "layers.0.gate.weight.own['x']": "layers.0.gate.weight"}
    finally:
        GLOBAL.clear()


def test_equal_weights_do_not_make_a_copy_one_of_each_of_them() -> None:
    """SGLang's dummy weights of one shape are equal, and it may capture CUDA graphs with them."""
    served = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    one, other = (each.weight for each in served)
    other.data.copy_(one)
    served.kept = other.detach().clone()  # type: ignore[assignment]
    served[0].w_kc = one.detach().clone()  # type: ignore[assignment]  # derived, so synced: no copy of the other's
    assert find_copies(served) == 1
    update(served)
    other.data.mul_(2)
    served[0].w_kc = torch.randn(4, 4)  # type: ignore[assignment]
    assert stale_copies(served) == {"kept": "0.weight or 1.weight or 0.w_kc"}
    served.kept = other.detach().clone()  # type: ignore[assignment]
    find_copies(served)
    assert stale_copies(served) == {}
    other.data.add_(1)
    assert stale_copies(served) == {"kept": "1.weight"}


def test_equal_constants_and_objects_that_hold_each_other_or_very_much_are_no_copy() -> None:
    served: Any = model()
    nn.init.zeros_(served[0].bias)
    served[0].register_buffer("shift", torch.zeros(16))
    served.me = SimpleNamespace(model=served, modules=sys, many=[[served]] * 10_000)
    served.me.me = served.me
    assert find_copies(served) == 0


def test_transposed_copies_and_parameters_that_were_put_together_are_found() -> None:
    served = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 5))
    served[0].turned = served[0].weight.detach().t().contiguous()  # type: ignore[assignment]
    served.merged = torch.cat([each.weight.detach() for each in served])  # type: ignore[assignment]
    assert find_copies(served) == 3 and stale_copies(served) == {}
    update(served)
    assert stale_copies(served) == {"merged": "0.weight and 1.weight", "0.turned": "0.weight"}
    assert find_copies(served) == 3, "what is stale stays known"
    served.merged[:3] = served[0].weight.detach()  # type: ignore[index]
    assert stale_copies(served)["merged"] == "1.weight", "the other part is right again"


@pytest.mark.parametrize("kept", ["tuple of the module", "tuple of the parameter"])
def test_a_copy_in_two_parts_is_found_wherever_it_is_kept(kept: str) -> None:
    """SGLang's split of a float32 weight into two of bfloat16, which it keeps on the parameter."""
    router = Router()
    router.weight = nn.Parameter(torch.randn(8, 16))
    high = router.weight.detach().to(torch.bfloat16)
    split = ("key", high, router.weight.detach() - high.float())
    (router if "module" in kept else router.weight).split = split
    assert find_copies(router) == 1 and stale_copies(router) == {}
    update(router)
    assert stale_copies(router) == {"split[1]" if "module" in kept else "weight.split[1]": "weight"}
