"""What the engine holds against what the trainer holds; the engine is a small model in this process."""

from collections.abc import Iterable

import pytest
import torch

from harness.weights.gather import full_tensor
from tests.weights.toy_model import SHAPES, Toy, ToySync, layout_of, live_name, live_of, sent, sync_to

pytestmark = pytest.mark.usefixtures("alone")


def sync_of(model: Toy | None = None, names: Iterable[str] = SHAPES, limit_bytes: int = 1 << 20) -> ToySync:
    """A sync by named tensors: reading back needs no pull."""
    names, values = list(names), sent(3)
    live = live_of({name: values.get(name, torch.ones(2)) for name in names})
    return sync_to(model or Toy(), live, layout_of(names), limit_bytes=limit_bytes, pull=False)


@pytest.mark.parametrize("limit_bytes", [1, 1 << 20], ids=["many buckets", "one bucket"])
def test_what_arrived_does_not_differ_ten_times_in_a_row(limit_bytes: int) -> None:
    sync = sync_of(limit_bytes=limit_bytes)
    assert {sentence.split(":")[0] for sentence in sync.differences()} >= SHAPES.keys(), "before the first sync"
    assert (len(sync.weights.buckets) > 1) == (limit_bytes == 1)
    for _ in range(10):
        for tensor in sync.tensors.values():
            tensor.mul_(1.25)
        sync.update_engine()
        assert sync.differences() == []


def test_what_the_engine_never_reads_is_named() -> None:
    sync = sync_of(names=[*SHAPES, "unheard_of"])
    sync.update_engine()
    assert sync.differences() == ["unheard_of: the engine holds nothing of it"]


def test_what_is_wrong_is_named_with_its_tensor_and_counted_by_bits() -> None:
    sync = sync_of()
    model = sync.model
    sync.tensors[live_name("q")][0, 0], sync.tensors[live_name("q")][0, 1] = float("nan"), 0.0
    sync.update_engine()
    assert not torch.equal(model.gate.float(), full_tensor(sync.tensors[live_name("gate")])), "the engine rounds it"
    assert sync.differences() == [], "one NaN is itself, and what is rounded is compared rounded"
    model.down.view(torch.int32)[2, 3] ^= 1
    model.gate.view(torch.int16)[0, 0] ^= 1
    model.qkv.data[0, 1] = -0.0
    k, v = model.qkv.data[4:6].clone(), model.qkv.data[6:8].clone()
    model.qkv.data[4:6], model.qkv.data[6:8] = v, k
    counts = {"q": "1 of 16", "k": "8 of 8", "v": "8 of 8", "down": "1 of 24", "gate": "1 of 12"}
    assert sorted(sync.differences()) == sorted(f"{name}: {count} elements on rank 0" for name, count in counts.items())
    model.down.data = torch.zeros_like(model.down.data)  # a replaced parameter is compared itself
    assert "down: 24 of 24 elements on rank 0" in sync.differences()


def test_a_stale_derived_tensor_is_named() -> None:
    sync = sync_of()
    sync.update_engine()
    sync.loader.trace()
    sync.model.w_kc = torch.zeros(2, 6)
    for _ in range(2):  # a check that made it right would not name it twice
        assert sync.differences() == ["w_kc, which the engine computes as it loads: 12 of 12 elements on rank 0"]


def test_what_cannot_be_followed_is_compared_by_loading_it_again() -> None:
    class Doubling(Toy):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights((name, loaded * 2 if name == "scale" else loaded) for name, loaded in weights)

    sync = sync_of(Doubling())
    sync.update_engine()
    assert sync.differences() == []
    assert sync.loader.opaque == {"scale"}
    sync.model.scale[1] += 1
    assert sync.differences() == ["scale, which the engine computes as it loads: 1 of 4 elements on rank 0"]


def test_a_part_of_joined_halves_is_compared_by_loading_it_again() -> None:
    class Cutting(Toy):
        """Joins the halves first and takes all but the first row afterwards."""

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            pairs = dict(weights)
            if pairs.keys() >= {"q_a", "kv_a"}:
                self.q_and_kv_a.data[1:].copy_(torch.cat([pairs.pop("q_a"), pairs.pop("kv_a")]).narrow(0, 1, 4))
            super().load_weights(pairs.items())

    sync = sync_of(Cutting())
    sync.update_engine()
    assert sync.differences() == []
    assert sync.loader.opaque == {"kv_a", "q_a"}
    assert torch.equal(sync.model.q_and_kv_a.data[1:3], full_tensor(sync.tensors[live_name("q_a")])[1:])
    sync.model.q_and_kv_a.data[3] *= 2
    assert sync.differences() == ["q_and_kv_a, which the engine computes as it loads: 4 of 20 elements on rank 0"]
