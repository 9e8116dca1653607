import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from harness.tools.sync.job import all_gather_row, one_by_one_row, push_one_by_one, transport_row
from harness.weights.names import CheckpointTensor
from tests.cluster.gloo import on_ranks

WORLD: Any = SimpleNamespace(device=torch.device("cpu"))
REPEATS = 3
SLOW_RANK, SLOW_SECONDS = 1, 0.06


class Notes:
    """In place of an engine: the names of each call, and a mark for each flush of the prefix cache."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        yield

    def update_weights_from_tensor(self, tensors: list[tuple[str, torch.Tensor]], flush_cache: bool) -> None:
        assert not flush_cache and all(tensor.shape[0] == 5 or name == "b" for name, tensor in tensors)
        self.calls.append([name for name, _ in tensors])

    def flush_cache(self) -> None:
        self.calls.append(["flush"])


class Pushing:
    """In place of a WeightSync: a push that takes one rank longer than the other, and the first one longer than others."""

    nbytes = 3_000_001
    transport_name = "pull"

    def __init__(self, rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        self.rank, self.engine, self.pushes = rank, Notes(), 0
        self.live = {
            "a": distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0)]),
            "b": torch.ones(3),
        }
        self.layout = (named("left", "a", (5, 1), 0), named("right", "a", (5, 1), 1), named("b", "b", (3,), 0))
        self.link = SimpleNamespace(seconds={}, sent_bytes=0)

    def push(self) -> None:
        time.sleep(SLOW_SECONDS * (1 if self.pushes else 3) if self.rank == SLOW_RANK else 0)
        self.pushes += 1
        self.link.seconds = float(self.pushes + self.rank)
        self.link.sent_bytes = 1000 + self.rank


def named(name: str, live_name: str, shape: tuple[int, ...], offset: int) -> CheckpointTensor:
    stride = (2, 1) if len(shape) > 1 else (1,)
    return CheckpointTensor(
        name=name, live_name=live_name, shape=shape, stride=stride, offset=offset, dtype=torch.float32
    )


def _bench(rank: int) -> tuple[list[dict[str, Any]], list[list[str]], int]:
    sync: Any = Pushing(rank)
    rows = [all_gather_row(sync, WORLD, REPEATS), transport_row(sync, WORLD, REPEATS)]
    pushes = sync.pushes
    sync.transport_name = "bucket"
    rows += [transport_row(sync, WORLD, 1), one_by_one_row(sync, WORLD, REPEATS)]
    sync.engine.calls.clear()
    push_one_by_one(sync)
    return [asdict(row) for row in rows], sync.engine.calls, pushes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(_bench, 2, tmp_path_factory.mktemp("ranks"))


def test_every_rank_has_the_same_rows_which_are_the_slowest_ones(ranks: list[Any]) -> None:
    (rows, _, pushes), (others, *_) = ranks
    assert rows == others
    assert [row["way"] for row in rows] == ["all-gather", "pull", "bucket", "one tensor a call, as VerlEngine"]
    assert rows[0]["fastest"] > 0
    assert rows[1]["seconds"] >= rows[1]["fastest"] >= SLOW_SECONDS
    assert {row["nbytes"] for row in rows} == {3_000_001}
    assert {row["extra_bytes"] for row in rows} == {None}, "on the CPU nothing is known of it"
    assert pushes == 1 + REPEATS


def test_the_first_sync_and_a_pull_s_own_copies_have_figures_of_their_own(ranks: list[Any]) -> None:
    all_gather, pull, bucket, one_by_one = ranks[0][0]
    assert pull["first"] >= 3 * SLOW_SECONDS > pull["fastest"] and bucket["first"] >= SLOW_SECONDS
    assert pull["copy"] == 4.0, "of pushes 2, 3 and 4, on the slower rank 3.0, 4.0 and 5.0"
    assert pull["sent_bytes"] == 2001, "by both ranks, in one sync"
    for row in (all_gather, bucket, one_by_one):
        assert row["copy"] is row["sent_bytes"] is None
    assert all_gather["first"] is one_by_one["first"] is None


def test_one_tensor_a_call_is_that(ranks: list[Any]) -> None:
    for _, calls, _ in ranks:
        assert calls == [["left"], ["right"], ["b"], ["flush"]]
