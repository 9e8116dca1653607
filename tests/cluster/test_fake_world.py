"""512 ranks without their machines: mesh and placement under a fake process group agree with the plan."""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
import torch.distributed as dist

from harness.cluster.mesh import ParallelDims, build_meshes
from harness.cluster.placement import RankLocation, parse_visible, place
from harness.tools.plan.dry_run import planned_locations

NNODES, PER_HOST = 64, 8
WORLD = NNODES * PER_HOST
SHAPES = [
    ParallelDims(dp=32, tp=16, pp=1),
    ParallelDims(dp=32, tp=8, pp=2, rank_order="dp,pp,tp"),
    ParallelDims(dp=16, tp=16, pp=2, rank_order="dp,pp,tp"),
    ParallelDims(dp=128, tp=2, pp=2),
]


@contextmanager
def fake_world(rank: int) -> Iterator[None]:
    """This process as one of 512: the fake group answers every collective at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def visible_by_host(kind: str) -> tuple[str | None, ...]:
    """CUDA_VISIBLE_DEVICES of each host: unset, its own order on each, its own UUIDs, or a mix."""
    random = Random(0)
    orders = [",".join(map(str, random.sample(range(PER_HOST), PER_HOST))) for _ in range(NNODES)]
    uuids = [",".join(f"GPU-{host:08x}-1111-2222-3333-{gpu:012x}" for gpu in range(PER_HOST)) for host in range(NNODES)]
    mixed = [(None, orders[host], uuids[host])[host % 3] for host in range(NNODES)]
    return {"unset": (), "orders": tuple(orders), "uuids": tuple(uuids), "mixed": tuple(mixed)}[kind]


def reported_locations(visible: tuple[str | None, ...]) -> list[RankLocation]:
    """What the ranks would report of themselves, in no order."""
    locations = [
        RankLocation(
            rank,
            f"host{rank // PER_HOST}",
            rank % PER_HOST,
            parse_visible(visible[rank // PER_HOST] if visible else None),
            PER_HOST,
        )
        for rank in range(WORLD)
    ]
    Random(1).shuffle(locations)
    return locations


@pytest.mark.parametrize("dims", SHAPES)
def test_the_mesh_is_that_of_the_dims(dims: ParallelDims) -> None:
    places = [dims.coordinates(rank) for rank in range(WORLD)]
    for rank in (0, 7, 8, 131, 256, 511):
        with fake_world(rank):
            mesh = build_meshes(dims, "cpu").engines
            own = places[rank]
            assert mesh.mesh_dim_names == ("dp", "tp", "pp")
            assert tuple(mesh.get_coordinate() or ()) == (own.dp, own.tp, own.pp)
            # Its engine's ranks in the mesh, in engine order: stages slowest.
            assert tuple(mesh.mesh[own.dp].T.flatten().tolist()) == dims.engine_ranks(own.dp)
            for axis in ("dp", "tp", "pp"):
                peers = [number for number, each in enumerate(places) if _same_but(each, own, axis)]
                assert dist.get_process_group_ranks(mesh.get_group(axis)) == peers


def _same_but(one: object, other: object, axis: str) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in ("dp", "tp", "pp") if name != axis)


@pytest.mark.parametrize("kind", ["unset", "orders", "uuids", "mixed"])
@pytest.mark.parametrize("dims", SHAPES)
def test_a_run_is_placed_as_it_was_planned(dims: ParallelDims, kind: str) -> None:
    visible = visible_by_host(kind)
    planned = place(dims, planned_locations(dims, NNODES, PER_HOST, "cuda", visible), "cuda")
    assert place(dims, reported_locations(visible), "cuda") == planned


def test_a_mesh_that_placement_refuses_the_plan_refuses_too() -> None:
    dims = ParallelDims(dp=16, tp=16, pp=2)  # tensor-parallel ranks of one stage on every other GPU of four hosts
    with pytest.raises(ValueError, match='set parallel.rank_order = "dp,pp,tp"'):
        place(dims, planned_locations(dims, NNODES, PER_HOST, "cuda"), "cuda")
    locations = [RankLocation(rank, f"host{rank // PER_HOST}", rank % PER_HOST, None) for rank in range(WORLD)]
    with pytest.raises(ValueError, match='set parallel.rank_order = "dp,pp,tp"'):
        place(dims, locations, "cuda")


def test_a_mesh_of_the_wrong_world_size_is_refused() -> None:
    with fake_world(0), pytest.raises(ValueError, match=r"2 \* 4 \* 1 = 8, but the world size is 512"):
        build_meshes(ParallelDims(dp=2, tp=4, pp=1), "cpu")
