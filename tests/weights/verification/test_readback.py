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
    assert (len(sync.weights.buckets) > 1) == (limit_bytes == 1)
    for _ in range(10):
        for tensor in sync.tensors.values():
            tensor.mul_(1.25)
        sync.update_engine()
        assert sync.differences() == []


def test_before_the_first_sync_everything_differs() -> None:
    assert {sentence.split(":")[0] for sentence in sync_of().differences()} >= SHAPES.keys()


def test_what_the_engine_never_reads_is_named() -> None:
    sync = sync_of(names=[*SHAPES, "unheard_of"])
    sync.update_engine()
    assert sync.differences() == ["unheard_of: the engine holds nothing of it"]


def test_one_bit_of_one_element_is_named_with_its_tensor() -> None:
    sync = sync_of()
    sync.update_engine()
    sync.model.down.view(torch.int32)[2, 3] ^= 1
    assert sync.differences() == ["down: 1 of 24 elements on rank 0"]


def test_two_that_were_swapped_are_both_named() -> None:
    sync = sync_of()
    sync.update_engine()
    k, v = sync.model.qkv.data[4:6].clone(), sync.model.qkv.data[6:8].clone()
    sync.model.qkv.data[4:6], sync.model.qkv.data[6:8] = v, k
    assert sync.differences() == ["k: 8 of 8 elements on rank 0", "v: 8 of 8 elements on rank 0"]


def test_bits_count_not_values() -> None:
    sync = sync_of()
    sync.tensors[live_name("q")][0, 0], sync.tensors[live_name("q")][0, 1] = float("nan"), 0.0
    sync.update_engine()
    assert sync.differences() == []  # one NaN is itself
    sync.model.qkv.data[0, 1] = -0.0
    assert sync.differences() == ["q: 1 of 16 elements on rank 0"]


def test_what_the_engine_rounds_is_compared_rounded() -> None:
    sync = sync_of()
    sync.update_engine()
    assert not torch.equal(sync.model.gate.float(), full_tensor(sync.tensors[live_name("gate")]))
    assert sync.differences() == []
    sync.model.gate.view(torch.int16)[0, 0] ^= 1
    assert sync.differences() == ["gate: 1 of 12 elements on rank 0"]


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


def test_a_replaced_parameter_is_compared_itself() -> None:
    sync = sync_of()
    sync.update_engine()
    assert sync.differences() == []
    sync.model.down.data = torch.zeros_like(sync.model.down.data)
    assert sync.differences() == ["down: 24 of 24 elements on rank 0"]
