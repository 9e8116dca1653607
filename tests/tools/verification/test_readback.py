"""What the engine holds against what the trainer holds; the engine is a small model in this process."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.tools.verification.readback import unreadable, weight_differences
from harness.weights.gather import full_tensor
from harness.weights.names import CheckpointTensor
from harness.weights.pull.link import PullLink
from tests.weights.toy_model import SHAPES, Toy, layout_of, link_to, live_name, live_of, sent


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """This process is the only rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@dataclass
class Sync:
    """What weight_differences() takes of a WeightSync, with the engine's model beside it."""

    model: Toy
    live: dict[str, torch.Tensor]
    layout: tuple[CheckpointTensor, ...]
    link: PullLink
    transport_name: str = "pull"
    offloaded: bool = False

    @property
    def engine(self) -> Any:
        return self.link.engine

    def push(self) -> None:
        self.link.pull()

    def differences(self) -> list[str]:
        return weight_differences(self)  # type: ignore[arg-type]


def sync_of(model: Toy | None = None, names: Iterable[str] = SHAPES) -> Sync:
    model, layout, values = model or Toy(), layout_of(names), sent(3)
    live = live_of({name: values.get(name, torch.ones(2)) for name in names})
    return Sync(model, live, layout, link_to(model, live, layout))


def test_what_arrived_does_not_differ_ten_times_in_a_row() -> None:
    sync = sync_of()
    for _ in range(10):
        for tensor in sync.live.values():
            tensor.mul_(1.25)
        sync.push()
        assert sync.differences() == []


def test_before_the_first_push_everything_differs() -> None:
    assert {sentence.split(":")[0] for sentence in sync_of().differences()} >= SHAPES.keys()


def test_what_the_engine_never_reads_is_named() -> None:
    sync = sync_of(names=[*SHAPES, "unheard_of"])
    sync.push()
    assert sync.differences() == ["unheard_of: the engine holds nothing of it"]


def test_one_bit_of_one_element_is_named_with_its_tensor() -> None:
    sync = sync_of()
    sync.push()
    sync.model.down.view(torch.int32)[2, 3] ^= 1
    assert sync.differences() == ["down: 1 of 24 elements on rank 0"]


def test_two_that_were_swapped_are_both_named() -> None:
    sync = sync_of()
    sync.push()
    k, v = sync.model.qkv.data[4:6].clone(), sync.model.qkv.data[6:8].clone()
    sync.model.qkv.data[4:6], sync.model.qkv.data[6:8] = v, k
    assert sync.differences() == ["k: 8 of 8 elements on rank 0", "v: 8 of 8 elements on rank 0"]


def test_a_trainer_that_went_on_differs_by_what_it_changed() -> None:
    sync = sync_of()
    sync.push()
    sync.live[live_name("q_a")][0, 0] += 1
    (found,) = sync.differences()
    assert found == "q_a: 1 of 12 elements on rank 0"


def test_bits_count_not_values() -> None:
    sync = sync_of()
    sync.live[live_name("q")][0, 0], sync.live[live_name("q")][0, 1] = float("nan"), 0.0
    sync.push()
    assert sync.differences() == []  # one NaN is itself
    sync.model.qkv.data[0, 1] = -0.0
    assert sync.differences() == ["q: 1 of 16 elements on rank 0"]


def test_what_the_engine_rounds_is_compared_rounded() -> None:
    sync = sync_of()
    sync.push()
    assert not torch.equal(sync.model.gate.float(), full_tensor(sync.live[live_name("gate")]))
    assert sync.differences() == []
    sync.model.gate.view(torch.int16)[0, 0] ^= 1
    assert sync.differences() == ["gate: 1 of 12 elements on rank 0"]


def test_a_stale_derived_tensor_is_named() -> None:
    sync = sync_of()
    sync.push()
    sync.model.w_kc = torch.zeros(2, 6)
    assert sync.differences() == ["w_kc (derived by the engine): stale on rank 0"]
    assert sync.differences() == []


def test_what_cannot_be_followed_is_said_to_be_unread() -> None:
    class Doubling(Toy):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights((name, loaded * 2 if name == "scale" else loaded) for name, loaded in weights)

    sync = sync_of(Doubling())
    sync.push()
    assert unreadable(sync.link) == ["scale"]
    assert sync.differences() == []


def test_a_part_of_joined_halves_is_not_followed_and_said_to_be_unread() -> None:
    class Cutting(Toy):
        """Joins the halves first and takes all but the first row afterwards."""

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            pairs = dict(weights)
            if pairs.keys() >= {"q_a", "kv_a"}:
                self.q_and_kv_a.data[1:].copy_(torch.cat([pairs.pop("q_a"), pairs.pop("kv_a")]).narrow(0, 1, 4))
            super().load_weights(pairs.items())

    sync = sync_of(Cutting())
    sync.push()
    assert unreadable(sync.link) == ["kv_a", "q_a"]
    assert sync.differences() == []
    assert torch.equal(sync.model.q_and_kv_a.data[1:3], full_tensor(sync.live[live_name("q_a")])[1:])
