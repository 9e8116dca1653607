"""What an engine holds against the trainer's weights, by fingerprint and read back; the engine is a small model in
this process."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.trainer.offload import local
from harness.weights.gather import full_tensor
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


def sync_of(model: Toy | None = None, **more: Any) -> ToySync:
    return sync_to(model or Widening(), live_of(sent(3)), layout_of(SHAPES), **more)


def compare(sync: ToySync) -> FingerprintComparison:
    return compare_fingerprints(sync.weights, sync.loader)


def test_what_arrived_is_equal_and_a_sync_that_does_nothing_is_caught() -> None:
    sync = sync_of()
    assert {sentence.split(":")[0] for sentence in sync.differences()} >= SHAPES.keys(), "before the first sync"
    sync.update_engine()
    count = len(SHAPES)
    assert compare(sync) == FingerprintComparison(tensors=count, left=(), compared=count, wrong=())
    for tensor in sync.tensors.values():
        tensor.mul_(1.001)
    assert set(compare(sync).wrong) == SHAPES.keys()


@pytest.mark.parametrize("limit_bytes", [1, 1 << 20], ids=["many buckets", "one bucket"])
def test_what_arrived_by_name_does_not_differ_however_often(limit_bytes: int) -> None:
    sync = sync_of(Toy(), limit_bytes=limit_bytes, pull=False)
    assert (len(sync.weights.buckets) > 1) == (limit_bytes == 1)
    for _ in range(4):
        for tensor in sync.tensors.values():
            tensor.mul_(1.25)
        sync.update_engine()
        assert sync.differences() == []


def test_what_the_engine_never_reads_is_named() -> None:
    names = [*SHAPES, "unheard_of"]
    live = live_of(sent(3) | {"unheard_of": torch.ones(2)})
    sync = sync_to(Toy(), live, layout_of(names), pull=False)
    sync.update_engine()
    assert sync.differences() == ["unheard_of: the engine holds nothing of it"]


def test_what_is_wrong_is_named_with_its_tensor_and_counted_by_bits() -> None:
    sync = sync_of(Toy())
    model = sync.model
    sync.tensors[live_name("q")][0, 0], sync.tensors[live_name("q")][0, 1] = float("nan"), 0.0
    sync.update_engine()
    assert not torch.equal(model.gate.float(), full_tensor(sync.tensors[live_name("gate")])), "the engine rounds it"
    assert sync.differences() == [], "one NaN is itself, and what is rounded is compared rounded"
    model.embed.data[6, 1] = 0.5  # a loader makes the rest of a padded tensor zero, and the engine computes with it
    assert compare(sync).wrong == ("the padding of embed",)
    k, v = model.qkv.data[4:6].clone(), model.qkv.data[6:8].clone()
    model.qkv.data[4:6], model.qkv.data[6:8] = v, k
    assert compare(sync).wrong == ("k", "v", "the padding of embed")
    model.down.view(torch.int32)[2, 3] ^= 1
    model.gate.view(torch.int16)[0, 0] ^= 1
    model.qkv.data[0, 1] = -0.0
    counts = {"q": "1 of 16", "k": "8 of 8", "v": "8 of 8", "down": "1 of 24", "gate": "1 of 12"}
    counts["the padding of embed"] = "1 of 12"
    assert sorted(sync.differences()) == sorted(f"{name}: {count} elements on rank 0" for name, count in counts.items())


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


def test_what_the_engine_narrows_or_computes_is_not_said_to_be_equal_and_is_loaded_again() -> None:
    class Doubling(Toy):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights((name, loaded * 2 if name == "scale" else loaded) for name, loaded in weights)

    sync = sync_of(Doubling(), pull=False)  # it holds gate in bfloat16, too
    sync.update_engine()
    found = compare(sync)
    assert (found.tensors, found.compared, found.wrong) == (len(SHAPES), len(SHAPES) - 2, ())
    assert sync.differences() == []
    assert sync.loader.opaque == {"scale"}
    sync.model.scale[1] += 1
    sync.model.w_kc = torch.zeros(2, 6)
    said = ["scale", "w_kc"], ["1 of 4", "12 of 12"]
    for _ in range(2):  # a check that made it right would not name it twice
        assert sorted(sync.differences()) == [
            f"{name}, which the engine computes as it loads: {count} elements on rank 0"
            for name, count in zip(*said, strict=True)
        ]


def test_a_part_of_joined_halves_is_compared_by_loading_it_again() -> None:
    class Cutting(Toy):
        """Joins the halves first and takes all but the first row afterwards."""

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            pairs = dict(weights)
            if pairs.keys() >= {"q_a", "kv_a"}:
                self.q_and_kv_a.data[1:].copy_(torch.cat([pairs.pop("q_a"), pairs.pop("kv_a")]).narrow(0, 1, 4))
            super().load_weights(pairs.items())

    sync = sync_of(Cutting(), pull=False)
    sync.update_engine()
    assert sync.differences() == []
    assert sync.loader.opaque == {"kv_a", "q_a"}
    assert torch.equal(sync.model.q_and_kv_a.data[1:3], full_tensor(sync.tensors[live_name("q_a")])[1:])
    sync.model.q_and_kv_a.data[3] *= 2
    assert sync.differences() == ["q_and_kv_a, which the engine computes as it loads: 4 of 20 elements on rank 0"]


def test_a_tensor_put_in_a_parameter_s_place_after_the_plan_is_compared_itself() -> None:
    """A release and resume may give a parameter other memory. Then the traced tensor is not the one that serves."""
    sync = sync_of()
    sync.update_engine()
    sync.loader.trace()
    sync.model.down.data = sync.model.down.data.clone()
    assert compare(sync).wrong == () and sync.engine.asked.count("cover") == 2
    sync.model.down.data = torch.zeros_like(sync.model.down.data)
    assert compare(sync).wrong == ("down",)
    assert sync.differences() == ["down: 24 of 24 elements on rank 0"]
