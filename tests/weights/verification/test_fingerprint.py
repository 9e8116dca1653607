"""Fingerprints of what an engine holds against the trainer's; the engine is a small model in this process."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.trainer.offload import local
from harness.weights.loader import EngineLoader
from harness.weights.traced import model_state as fingerprint
from harness.weights.traced.model_state import BASE, INTEGER, weighted_sum
from harness.weights.verification.comparison import FingerprintComparison, compare_fingerprints
from tests.weights.toy_model import SHAPES, Toy, ToySync, layout_of, live_name, live_of, sent, sync_to

pytestmark = pytest.mark.usefixtures("alone")


def by_hand(values: torch.Tensor, stride: tuple[int, ...], offset: int) -> int:
    """The definition, in Python's integers."""
    bits = values.contiguous().view(INTEGER[values.element_size()])
    total = 0
    for place in torch.cartesian_prod(*[torch.arange(n) for n in values.shape]).reshape(-1, values.ndim).tolist():
        at = offset + sum(index * step for index, step in zip(place, stride, strict=True))
        total += int(bits[tuple(place)]) * pow(BASE, at, 1 << 64)
    return total % (1 << 64)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
    st.integers(0, 1 << 40),
    st.integers(1, 9),
)
@settings(max_examples=60, deadline=None)
def test_the_sum_is_what_its_definition_says(shape: list[int], dtype: torch.dtype, offset: int, chunk: int) -> None:
    draw = torch.Generator().manual_seed(len(shape) + offset)
    values = (torch.randn(shape, generator=draw) * 100).to(dtype)
    stride = torch.empty(tuple(shape), device="meta").transpose(0, -1).stride()
    whole, fingerprint.CHUNK = fingerprint.CHUNK, chunk
    try:
        assert int(weighted_sum(values, stride, offset)) % (1 << 64) == by_hand(values, stride, offset)
    finally:
        fingerprint.CHUNK = whole


def test_a_transposed_view_and_an_expanded_element() -> None:
    held = torch.randn(3, 5)
    assert int(weighted_sum(held.T, (1, 5), 7)) == int(weighted_sum(held.T.contiguous(), (1, 5), 7))
    same = torch.full((4,), 2.5)
    assert int(weighted_sum(same, (0,), 3)) % (1 << 64) == by_hand(same[:1], (1,), 3)
    same[2] = 2.0
    assert int(weighted_sum(same, (0,), 3)) % (1 << 64) != by_hand(same[:1], (1,), 3)


def test_shards_add_up_to_the_whole() -> None:
    whole = torch.randn(10, 6).bfloat16()
    parts = [weighted_sum(whole[a:b].reshape(-1), (1,), 6 * a) for a, b in ((0, 4), (4, 8), (8, 10))]
    columns = [weighted_sum(whole[:, a:b], (6, 1), a) for a, b in ((0, 3), (3, 6))]
    assert int(sum(parts)) == int(sum(columns)) == int(weighted_sum(whole, (6, 1), 0))


class Widening(Toy):
    """Holds `gate` in float32 as it was sent: a narrower copy cannot be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.gate.data = self.gate.data.float()


def sync_of(model: Toy | None = None) -> ToySync:
    values = sent(3)
    return sync_to(model or Widening(), live_of(values), layout_of(SHAPES))


def compare(sync: ToySync) -> FingerprintComparison:
    return compare_fingerprints(sync.weights, sync.loader)


def test_what_arrived_is_equal_and_a_sync_that_does_nothing_is_caught() -> None:
    sync = sync_of()
    sync.update_engine()
    count = len(SHAPES)
    assert compare(sync) == FingerprintComparison(tensors=count, left=(), compared=count, wrong=())
    for tensor in sync.tensors.values():
        tensor.mul_(1.001)
    assert set(compare(sync).wrong) == SHAPES.keys()


def test_one_stale_element_names_its_tensor_alone() -> None:
    sync = sync_of()
    sync.update_engine()
    for name in SHAPES:
        last = local(sync.tensors[live_name(name)]).view(-1)[-1:].view(torch.int32)
        last.bitwise_xor_(1)
        assert compare(sync).wrong == (name,)
        last.bitwise_xor_(1)


def test_ranks_that_hold_the_same_elements_must_hold_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them is right, and whatever the sum over all of them says."""
    sync = sync_of()
    sync.update_engine()
    held = sync.loader.fingerprints()[0]
    sync.loader.coverage = (sync.loader.coverage[0], replace(sync.loader.coverage[0], rank=1))
    number = next(n for n, group in enumerate(sync.loader.groups) if group.views[0].name == "down")
    other = held | {f"{number}/0": held[f"{number}/0"] + 1}
    monkeypatch.setattr(EngineLoader, "fingerprints", lambda _: {0: held, 1: other})
    assert "down" in compare(sync).wrong


def test_garbage_in_padding_and_two_that_were_swapped_are_caught() -> None:
    """A loader makes the rest of a padded tensor zero, and the engine computes with it."""
    sync = sync_of()
    sync.update_engine()
    sync.model.embed.data[6, 1] = 0.5
    assert compare(sync).wrong == ("the padding of embed",)
    assert sync.differences() == ["the padding of embed: 1 of 12 elements on rank 0"]
    sync.update_engine()
    qkv = sync.model.qkv.data
    qkv[4:6], qkv[6:8] = qkv[6:8].clone(), qkv[4:6].clone()
    assert compare(sync).wrong == ("k", "v")


def test_what_the_engine_narrows_or_computes_is_not_said_to_be_equal() -> None:
    class Doubling(Toy):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights((name, loaded * 2 if name == "scale" else loaded) for name, loaded in weights)

    sync = sync_of(Doubling())  # it holds gate in bfloat16, too
    sync.update_engine()
    found = compare(sync)
    assert (found.tensors, found.compared, found.wrong) == (len(SHAPES), len(SHAPES) - 2, ())


def test_a_tensor_put_in_a_parameter_s_place_after_the_plan_is_compared_itself() -> None:
    """A release and resume may give a parameter other memory. Then the traced tensor is not the one that serves."""
    sync = sync_of()
    sync.update_engine()
    sync.loader.trace()
    sync.model.down.data = sync.model.down.data.clone()
    assert compare(sync).wrong == () and sync.engine.asked.count("cover") == 2
    sync.model.down.data = torch.zeros_like(sync.model.down.data)
    assert compare(sync).wrong == ("down",)
