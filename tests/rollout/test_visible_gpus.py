"""Which GPUs an engine's processes are shown, without building one."""

from types import SimpleNamespace
from typing import Any

import pytest

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import RankLocation, place
from harness.rollout.verl_engine import VerlEngine


def engine_of(rank: int, locations: list[RankLocation]) -> Any:
    """What `rank` has of an engine of tp 2, one of two of a host."""
    engine: Any = object.__new__(VerlEngine)
    placement = place(ParallelDims(dp=2, tp=2, pp=1), locations, "cuda")[rank // 2]
    engine.node, engine.device_type = placement.nodes[0], "cuda"
    engine.api, engine.engine_args = SimpleNamespace(graphs_in_memory_saver=False), {}
    engine._locations, engine.group = dict(enumerate(locations)), SimpleNamespace(rank=rank)
    return engine


@pytest.mark.parametrize(
    ("offset", "visible", "seen", "trains_on"),
    [
        (0, None, ("2", "3", "0", "1", "4", "5", "6", "7"), "3"),
        (0, ("6", "4", "2", "0"), ("2", "0", "6", "4"), "0"),
        (4, None, ("6", "7", "0", "1", "2", "3", "4", "5"), "3"),  # parallel.colocate = false
    ],
)
def test_own_gpus_come_first(
    offset: int, visible: tuple[str, ...] | None, seen: tuple[str, ...], trains_on: str
) -> None:
    count = 8 if visible is None else len(visible)
    locations = [RankLocation(rank, "h", rank, visible, count, offset) for rank in range(4)]
    engine = engine_of(3, locations)
    made = engine._environment()
    assert made["CUDA_VISIBLE_DEVICES"] == ",".join(seen)
    assert made["SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS"] is None
    assert (engine.visible_gpus, engine.trainer_gpu) == (seen, trains_on)
    of_one_each = engine_of(2, [RankLocation(rank, "h", rank, (str(rank),), 1) for rank in range(4)])
    assert (of_one_each.visible_gpus, of_one_each.trainer_gpu) == (("2", "3"), "2"), "they add none"
