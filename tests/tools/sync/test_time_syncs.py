import time
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from harness.tools.sync.time_syncs import BenchRow, all_gather_row, as_table, sync_row
from tests.cluster.gloo import on_ranks

WORLD: Any = SimpleNamespace(device=torch.device("cpu"))
REPEATS = 3
SLOW_RANK, SLOW_SECONDS = 1, 0.06


class Syncing:
    """A WeightSync that takes one rank longer than the other, and the first time longer than later."""

    def __init__(self, rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        self.rank, self.syncs = rank, 0
        tensors = {
            "a": distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0)]),
            "b": torch.ones(3),
        }
        self.weights = SimpleNamespace(tensors=tensors, nbytes=3_000_001)

    def update_engine(self) -> None:
        time.sleep(SLOW_SECONDS * (1 if self.syncs else 3) if self.rank == SLOW_RANK else 0)
        self.syncs += 1


def _bench(rank: int) -> tuple[list[dict[str, Any]], int]:
    sync: Any = Syncing(rank)
    rows = [all_gather_row(sync.weights, WORLD, REPEATS), sync_row("pull", sync, WORLD, REPEATS)]
    return [asdict(row) for row in rows], sync.syncs


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(_bench, 2, tmp_path_factory.mktemp("ranks"))


def test_every_rank_has_the_same_rows_which_are_the_slowest_ones(ranks: list[Any]) -> None:
    (rows, syncs), (others, _) = ranks
    assert rows == others
    assert [row["way"] for row in rows] == ["all-gather", "pull"]
    all_gather, pull = rows
    assert all_gather["fastest"] > 0
    assert pull["seconds"] >= pull["fastest"] >= SLOW_SECONDS and pull["first"] >= 3 * SLOW_SECONDS
    assert all_gather["first"] is None
    assert {row["nbytes"] for row in rows} == {3_000_001}
    assert {row["extra_bytes"] for row in rows} == {None}, "on the CPU nothing is known of it"
    assert syncs == 1 + REPEATS


def test_the_table_has_a_line_for_each_way_and_blanks_for_what_was_not_measured() -> None:
    weights: Any = SimpleNamespace(nbytes=2 * 10**9, layout=range(339), buckets=range(30))
    limit = BenchRow(way="all-gather", seconds=0.038, fastest=0.037, nbytes=2 * 10**9)
    pull = replace(limit, way="pull", seconds=1.0, fastest=0.9, first=1.25, extra_bytes=31 << 20)
    text = as_table([limit, pull], weights)
    assert "2.000 GB, 339 tensors, 30 buckets" in text
    lines = {line.split()[1]: line.split() for line in text.splitlines() if len(line.split()) > 3}
    figures = {way: [word for word in words if word[0].isdigit()] for way, words in lines.items()}
    assert figures["all-gather"] == ["0.0380", "0.0370", "52.6"]
    assert figures["pull"] == ["1.0000", "0.9000", "1.2500", "2.0", "31"]
