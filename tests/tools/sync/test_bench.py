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

from harness.tools.sync.job import bench, push_one_by_one
from harness.weights.names import CheckpointTensor
from tests.cluster.gloo import on_ranks

WORLD: Any = SimpleNamespace(device=torch.device("cpu"))
SLOW_RANK, SLOW_SECONDS = 1, 0.06


def _bench(rank: int) -> tuple[list[dict[str, Any]], list[list[str]], int]:
    """A push that takes one rank longer than the other, in place of one to an engine."""
    mesh = init_device_mesh("cpu", (2,))
    live = {"a": distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0)]), "b": torch.ones(3)}
    calls: list[list[str]] = []
    flushes = []

    class Notes:
        @contextmanager
        def weight_update(self) -> Iterator[None]:
            yield

        def update_weights_from_tensor(self, tensors: list[tuple[str, torch.Tensor]], flush_cache: bool) -> None:
            assert not flush_cache and all(tensor.shape[0] == 5 or name == "b" for name, tensor in tensors)
            calls.append([name for name, _ in tensors])

        def flush_cache(self) -> None:
            flushes.append(len(calls))

    def push() -> None:
        time.sleep(SLOW_SECONDS if rank == SLOW_RANK else 0)

    def named(name: str, live_name: str, shape: tuple[int, ...], offset: int) -> CheckpointTensor:
        stride = (2, 1) if len(shape) > 1 else (1,)
        return CheckpointTensor(
            name=name, live_name=live_name, shape=shape, stride=stride, offset=offset, dtype=torch.float32
        )

    sync: Any = SimpleNamespace(
        live=live,
        layout=(named("left", "a", (5, 1), 0), named("right", "a", (5, 1), 1), named("b", "b", (3,), 0)),
        nbytes=3_000_001,
        transport_name="stream",
        push=push,
        parts=lambda: {"fill": 1.0 + rank, "wait": 2.0 - rank},
        engine=Notes(),
    )
    rows = bench(sync, WORLD, repeats=3, one_by_one=True)
    calls.clear()
    push_one_by_one(sync)
    return [asdict(row) for row in rows], calls, flushes[-1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(_bench, 2, tmp_path_factory.mktemp("ranks"))


def test_every_rank_has_the_same_rows_which_are_the_slowest_ones(ranks: list[Any]) -> None:
    (rows, *_), (others, *_) = ranks
    assert rows[0]["fastest"] > 0
    for one, other in zip(rows, others, strict=True):
        assert (one["seconds"], one["fastest"], one["parts"]) == (other["seconds"], other["fastest"], other["parts"])
    assert [row["way"] for row in rows] == [
        "all-gather of the same bytes", "transport stream", "one tensor a call, as VerlEngine",
    ]  # fmt: skip
    assert rows[1]["seconds"] >= rows[1]["fastest"] >= SLOW_SECONDS
    assert rows[1]["parts"] == {"fill": 2.0, "wait": 2.0}  # each where it was longest
    assert {row["nbytes"] for row in rows} == {3_000_001}
    assert {row["peak_extra_bytes"] for row in rows} == {None}


def test_one_tensor_a_call_is_that(ranks: list[Any]) -> None:
    for _, calls, flushed_after in ranks:
        assert calls == [["left"], ["right"], ["b"]]
        assert flushed_after == 3
