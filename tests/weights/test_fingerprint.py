"""Fingerprints of what an engine holds against the trainer's; the engine is a small model in this process."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.weights import fingerprint as trainer_side
from harness.weights.fingerprint import FingerprintComparison, compare_fingerprints
from harness.weights.gather import plan_buckets
from harness.weights.worker import model_state as fingerprint
from harness.weights.worker.model_state import BASE, INTEGER, WorkerReport, fingerprints, weighted_sum
from tests.weights.test_readback import Sync, sync_of
from tests.weights.toy_model import SHAPES, Toy


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


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """This process is the only rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Widening(Toy):
    """Holds `gate` in float32 as it was sent: a narrower copy cannot be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.gate.data = self.gate.data.float()


@dataclasses.dataclass
class Stand:
    """Fingerprints of a model in this process, whose only scheduler is asked without an engine."""

    sync: Sync
    asked_again: list[int]

    def compare(self) -> FingerprintComparison:
        return compare_fingerprints(self.sync)  # type: ignore[arg-type]


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stand]:
    def make(model: Toy | None = None, names: Iterable[str] = SHAPES) -> Stand:
        sync = sync_of(tmp_path, model or Widening(), names)
        again: list[int] = []
        planned = plan_buckets(sync.layout, sync.live, 1)
        pieces = {piece.live_name: piece for bucket in planned for piece in bucket.pieces}
        buckets = [
            SimpleNamespace(
                entries=bucket.entries,
                pieces=[
                    dataclasses.replace(pieces[entry.name], offset=entry.offset, group=entry.group)
                    for entry in bucket.entries
                ],
            )
            for bucket in sync.buckets
        ]

        def trace_again() -> None:
            again.append(1)
            assert sync.opened.reader is not None
            sync.opened.reader.make_plans()

        given: Any = sync
        given.buckets, given.coverage, given.trace_again = buckets, sync.opened.coverage, trace_again
        given.engine.group.process_group = None
        monkeypatch.setattr(
            trainer_side,
            "report_of_schedulers",
            lambda engine, loader: [WorkerReport(rank=0, device="cpu", tensors=fingerprints(sync.model))],
        )
        return Stand(sync, again)

    return make


def test_what_arrived_is_equal(stand: Callable[..., Stand]) -> None:
    here = stand()
    here.sync.push()
    count = len(SHAPES)
    assert here.compare() == FingerprintComparison(tensors=count, compared=count, wrong=())


def test_a_push_that_does_nothing_is_caught(stand: Callable[..., Stand]) -> None:
    here = stand()
    here.sync.push()
    assert here.compare().wrong == ()
    for tensor in here.sync.live.values():
        tensor.mul_(1.001)
    assert set(here.compare().wrong) == SHAPES.keys()


@pytest.mark.parametrize("name", SHAPES)
def test_one_stale_element_names_its_tensor_or_what_fuses_with_it(name: str, stand: Callable[..., Stand]) -> None:
    here = stand()
    here.sync.push()
    local = here.sync.live[name]
    local.view(-1)[-1:].view(torch.int32).bitwise_xor_(1) if not hasattr(local, "to_local") else local.to_local().view(
        -1
    )[-1:].view(torch.int32).bitwise_xor_(1)
    wrong = here.compare().wrong
    assert name in wrong and len(wrong) <= 3


def test_two_that_were_swapped_are_caught(stand: Callable[..., Stand]) -> None:
    here = stand()
    here.sync.push()
    qkv = here.sync.model.qkv.data
    qkv[4:6], qkv[6:8] = qkv[6:8].clone(), qkv[4:6].clone()
    assert {"k", "v"} <= set(here.compare().wrong)


def test_what_the_engine_narrows_or_computes_is_not_said_to_be_equal(stand: Callable[..., Stand]) -> None:
    class Doubling(Toy):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights((name, loaded * 2 if name == "scale" else loaded) for name, loaded in weights)

    here = stand(Doubling())  # it holds gate in bfloat16, too
    here.sync.push()
    found = here.compare()
    assert (found.tensors, found.compared, found.wrong) == (len(SHAPES), len(SHAPES) - 2, ())


def test_a_tensor_put_in_a_parameter_s_place_after_the_plan_is_compared_itself(stand: Callable[..., Stand]) -> None:
    """As a release and resume that give a parameter other memory: what the plans wrote to is not what serves."""
    here = stand()
    here.sync.push()
    here.sync.model.down.data = here.sync.model.down.data.clone()
    assert here.compare().wrong == () and here.asked_again == [1]
    here.sync.model.down.data = torch.zeros_like(here.sync.model.down.data)
    assert here.compare().wrong == ("down",)
