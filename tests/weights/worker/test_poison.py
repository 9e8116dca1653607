"""What a sync is to fill is overwritten before it; the engine is a small model in this process."""

from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch
from torch import nn

from harness.weights.verification.comparison import compare_fingerprints, load_again
from harness.weights.worker.kept_trace import VALUES, poison_value
from tests.weights.toy_model import SHAPES, Toy, ToySync, layout_of, live_of, same, sent, sync_to

pytestmark = pytest.mark.usefixtures("alone")


class Serving(Toy):
    """Has, besides what a sync fills, a rotary table, a parameter that no checkpoint has, and an index."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rotary", torch.ones(4), persistent=False)
        self.spare = nn.Parameter(torch.full((3,), 7.0))
        self.order = nn.Parameter(torch.arange(4), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        given = list(weights)
        super().load_weights(given)
        for name, loaded in given:
            if name == "order":
                self.order.data.copy_(loaded)


def sync_of(model: Toy, pull: bool = True, **more: torch.Tensor) -> ToySync:
    values = sent(3) | more
    layout = layout_of(SHAPES)
    if more:
        layout += layout_of(more, {name: tuple(each.shape) for name, each in more.items()}, torch.int64)
    return sync_to(model, live_of(values), layout, pull=pull)


def found(sync: ToySync) -> set[str]:
    compared = compare_fingerprints(sync.weights, sync.loader)
    again = load_again(sync.weights, sync.loader, compared.left)
    return {*compared.wrong, *(sentence.partition(" ")[0].rstrip(",") for sentence in again.wrong)}


@pytest.mark.parametrize("pull", [True, False])
def test_a_sync_that_does_nothing_shows_although_the_trainer_has_not_moved(pull: bool) -> None:
    sync = sync_of(Serving(), pull)
    sync.update_engine()
    assert found(sync) == set()
    sync.loader.poison(1)
    assert found(sync) >= {*SHAPES, "w_kc"}
    sync.update_engine()
    assert found(sync) == set()


@pytest.mark.parametrize("name", SHAPES)
def test_one_tensor_that_does_not_come_again_is_named(name: str) -> None:
    sync = sync_of(Serving(), pull=False)
    sync.update_engine()
    sync.loader.poison(1)
    kept, load = sync.model, sync.model.load_weights
    kept.load_weights = lambda weights: load([pair for pair in weights if pair[0] != name])
    sync.update_engine()
    kept.load_weights = load
    assert any(each.startswith((name, "q_and_kv_a", "w_kc", "gate")) for each in found(sync))


def test_only_what_a_sync_fills_is_overwritten_and_a_right_sync_leaves_no_trace() -> None:
    model, other = Serving(), Serving()
    sync, healthy = sync_of(model), sync_of(other)
    sync.update_engine()
    healthy.update_engine()
    before, not_filled = {name: each.clone() for name, each in model.values().items()}, sync.loader.other_tensors()
    assert sync.loader.poison(1)[0].left == ()
    for name, each in model.values().items():
        untouched = name in ("spare", "order", "rotary")
        assert torch.equal(each, before[name]) == untouched, name
        assert untouched or each.eq(poison_value(1)).all(), name
    assert sync.loader.other_tensors() == not_filled and len(not_filled[0]) == 1
    sync.update_engine()
    assert same(model, other)
    model.rotary.mul_(1.001)
    assert sync.loader.other_tensors() != not_filled
    indexed = sync_of(Serving(), order=torch.tensor([2, 0, 1, 3]))
    indexed.update_engine()
    assert indexed.loader.poison(0)[0].left == ("order",), "an index stays as it is"
    assert indexed.model.order.tolist() == [2, 0, 1, 3]


def test_poisons_of_syncs_that_follow_each_other_differ_and_are_finite_in_every_dtype() -> None:
    dtypes = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.uint8]
    for dtype in dtypes:
        held = torch.ones(4, dtype=torch.float32).to(dtype)
        for number in range(VALUES):
            held.view(torch.uint8).fill_(0x20 + number)
            assert held.float().isfinite().all() and held.float().ne(0).all(), dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = [torch.tensor(poison_value(number)).to(dtype) for number in range(VALUES + 1)]
        assert all(one != other for one, other in pairwise(values))
        assert all(float(each) == poison_value(number) for number, each in enumerate(values)), dtype


def test_a_parameter_that_gets_memory_of_its_own_later_is_named() -> None:
    """A head that is tied to the embedding, until something unties it: the copies fill the embedding alone."""

    class Tied(Serving):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed

    sync = sync_of(Tied())
    sync.update_engine()
    assert found(sync) == set()
    sync.model.head.weight = nn.Parameter(sync.model.embed.data.clone(), requires_grad=False)
    assert {each.partition(":")[0] for each in found(sync)} == {"head.weight"}
