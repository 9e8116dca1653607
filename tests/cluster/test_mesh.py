"""Properties, for every shape up to 4 x 4 x 4 and both rank orders:

- every rank is in exactly one engine, that of its dp coordinate, at the position engine_rank;
- an engine's ranks are one contiguous range of world ranks, in either order;
- engine order is SGLang's: tp_size * pp_rank + tp_rank;
- the DeviceMesh gives every rank the same coordinates, and sub-groups of the same ranks.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cluster.mesh import ParallelDims, build_meshes
from tests.cluster.gloo import forkserver

RANK_ORDERS = ("dp,tp,pp", "dp,pp,tp")
sizes = st.integers(1, 4)
all_dims = st.builds(ParallelDims, dp=sizes, tp=sizes, pp=sizes, rank_order=st.sampled_from(RANK_ORDERS))


@settings(deadline=None, max_examples=25)
@given(all_dims)
def test_every_rank_is_in_exactly_one_engine(dims: ParallelDims) -> None:
    engines = [dims.engine_ranks(dp) for dp in range(dims.dp)]
    assert sorted(rank for engine in engines for rank in engine) == list(range(dims.world_size))
    for dp, engine in enumerate(engines):
        assert sorted(engine) == list(range(engine[0], engine[0] + dims.tp * dims.pp))
        for position, rank in enumerate(engine):
            at = dims.coordinates(rank)
            assert (at.dp, dims.tp * at.pp + at.tp) == (dp, position)
            assert dims.engine_rank(rank) == position


@settings(deadline=None, max_examples=25)
@given(all_dims)
def test_rank_orders_are_the_documented_formulas(dims: ParallelDims) -> None:
    for rank in range(dims.world_size):
        at = dims.coordinates(rank)
        if dims.rank_order == "dp,tp,pp":
            assert rank == (at.dp * dims.tp + at.tp) * dims.pp + at.pp
        else:
            assert rank == (at.dp * dims.pp + at.pp) * dims.tp + at.tp


def test_the_error_spells_out_the_product() -> None:
    dims = ParallelDims(dp=2, tp=4, pp=1)
    dims.validate(8)
    with pytest.raises(ValueError) as raised:
        dims.validate(4)
    assert str(raised.value) == (
        "parallel.dp * parallel.tp * parallel.pp = 2 * 4 * 1 = 8, but the world size is 4: start 8 ranks "
        "(--nnodes times --nproc-per-node) or set parallel.dp = 1"
    )
    with pytest.raises(ValueError, match=r"world size is 6: start 8 ranks \(--nnodes times --nproc-per-node\)$"):
        dims.validate(6)


def _peers(dims: ParallelDims, rank: int, axis: str) -> list[int]:
    """World ranks that differ from rank in this axis alone, by their coordinate in it."""
    at = {other: dims.coordinates(other)._replace(**{axis: 0}) for other in range(dims.world_size)}
    peers = [other for other in at if at[other] == at[rank]]
    return sorted(peers, key=lambda other: int(getattr(dims.coordinates(other), axis)))


def _gather_over_every_axis(rank: int, store: str, shapes: list[ParallelDims]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    try:
        for dims in shapes:
            mesh = build_meshes(dims, "cpu").engines
            for axis in ("dp", "tp", "pp"):
                parts = [torch.zeros(1, dtype=torch.int64) for _ in range(getattr(dims, axis))]
                dist.all_gather(parts, torch.tensor([rank]), group=mesh.get_group(axis))
                assert [int(part) for part in parts] == _peers(dims, rank, axis), (rank, axis, dims)
                assert mesh.get_local_rank(axis) == getattr(dims.coordinates(rank), axis)
    finally:
        dist.destroy_process_group()


def test_mesh_of_four_gloo_processes(tmp_path: Path) -> None:
    shapes = [
        ParallelDims(dp=dp, tp=tp, pp=pp, rank_order=order)
        for dp, tp, pp in ((1, 2, 2), (2, 2, 1), (2, 1, 2))
        for order in RANK_ORDERS
    ]
    context = forkserver()
    store = str(tmp_path / "store")
    processes = [context.Process(target=_gather_over_every_axis, args=(rank, store, shapes)) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
