from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from harness.trainer.rows import RowShards, own_rows
from tests.cluster.gloo import on_ranks


@pytest.mark.parametrize(
    ("rows", "ranks", "held"),
    [
        (10, 4, [(0, 3), (3, 6), (6, 9), (9, 10)]),
        (5, 4, [(0, 2), (2, 4), (4, 5), (5, 5)]),
        (8, 2, [(0, 4), (4, 8)]),
        (3, 1, [(0, 3)]),
    ],
)
def test_the_last_ranks_hold_fewer_rows_or_none(rows: int, ranks: int, held: list[tuple[int, int]]) -> None:
    shards = RowShards(rows, 2, ranks)
    assert [(each.start, each.stop) for each in map(shards.rows_of, range(ranks))] == held


def test_a_tensor_that_is_not_sharded_is_on_one_rank_whole() -> None:
    assert RowShards.of(torch.ones(5, 2, 3)) == RowShards(5, 6, 1)
    assert RowShards.of(torch.tensor(7)) == RowShards(1, 1, 1)
    assert own_rows(torch.ones(5, 2)) == range(5)


def _compare_with_torch(rank: int) -> list[str]:
    """Return where RowShards and torch disagree on this rank, and the error for a tensor that is not sharded by
    rows."""
    mesh = init_device_mesh("cpu", (3,))
    wrong = []
    for rows in range(1, 9):
        whole = torch.arange(2.0 * rows).view(rows, 2)
        tensor = distribute_tensor(whole, mesh, [Shard(0)])
        mine = own_rows(tensor)
        if not torch.equal(tensor.to_local(), whole[mine.start : mine.stop]):
            wrong.append(f"{rows} rows: {mine}")
    try:
        RowShards.of(distribute_tensor(torch.ones(4, 2), mesh, [Replicate()]))
    except ValueError as error:
        wrong.append(str(error))
    return wrong


def test_the_rule_is_that_of_dtensor(tmp_path: Path) -> None:
    said = "placements must be (Shard(0),), that is rows over ranks, got (Replicate(),)"
    assert on_ranks(_compare_with_torch, 3, tmp_path) == [[said]] * 3
