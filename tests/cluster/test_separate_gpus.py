"""parallel.colocate = false: trainers on the first half of the visible GPUs, engine ranks on the second."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import RankLocation, engine_gpu_of, gpu_of, parse_visible, place
from harness.tools.picture import picture
from harness.tools.plan.dry_run import planned_locations

UUIDS = tuple(f"GPU-{index:08x}-1111-2222-3333-444444444444" for index in range(64))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[ParallelDims, list[RankLocation]]:
    """Engines within a host, each host with two visible GPUs a rank and perhaps more."""
    tp, engines, hosts = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    local = tp * engines
    locations = []
    for host in range(hosts):
        names = draw(st.sampled_from([tuple(map(str, range(64))), UUIDS]))
        visible = draw(st.sampled_from([None, tuple(draw(st.permutations(names[: 2 * local + 1])))]))
        locations += [
            RankLocation(host * local + rank, f"h{host}", rank, visible, None, local) for rank in range(local)
        ]
    return ParallelDims(dp=engines * hosts, tp=tp, pp=1), locations


@settings(deadline=None, max_examples=25)
@given(worlds())
def test_every_trainer_and_engine_rank_has_a_gpu_of_its_own(world: tuple[ParallelDims, list[RankLocation]]) -> None:
    dims, locations = world
    nodes = [node for placement in place(dims, locations, "cuda") for node in placement.nodes]
    used = [(location.host, gpu_of(location)) for location in locations]
    used += [(node.host, gpu) for node in nodes for gpu in node.visible_devices or ()]
    assert len(used) == len(set(used)) == 2 * dims.world_size
    for node in nodes:
        assert node.base_gpu_id == 0
        assert node.visible_devices == tuple(engine_gpu_of(locations[rank]) for rank in node.ranks)
        trainers = [gpu_of(location) for location in locations if location.host == node.host]
        assert locations[node.builder].visible is None or set(trainers) <= set(node.other_devices)
        for rank, gpu in zip(node.ranks, node.visible_devices or (), strict=True):
            visible = locations[rank].visible or tuple(map(str, range(64)))
            assert visible.index(gpu) == visible.index(gpu_of(locations[rank])) + locations[rank].engine_offset


@settings(deadline=None, max_examples=25)
@given(worlds())
def test_ranks_and_nodes_are_those_of_shared_gpus(world: tuple[ParallelDims, list[RankLocation]]) -> None:
    dims, locations = world
    shared = [replace(location, engine_offset=0) for location in locations]

    def without_gpus(locations: list[RankLocation]) -> list[object]:
        nodes = [node for each in place(dims, locations, "cuda") for node in each.nodes]
        return [replace(node, visible_devices=None, other_devices=()) for node in nodes]

    assert without_gpus(locations) == without_gpus(shared)


@pytest.mark.parametrize(
    ("visible", "count", "message"),
    [
        (
            "4,5,6",
            None,
            r"rank 1 on host h sees 3 GPUs \(CUDA_VISIBLE_DEVICES '4,5,6'\), but parallel.colocate = false needs 4,"
            " two for each of its torchrun's 2 ranks: make all of them visible to every rank, without a wrapper",
        ),
        ("7", None, "sees 1 GPUs .* without a wrapper that gives each rank its own, or set it to true"),
        (None, 2, r"sees 2 GPUs \(CUDA_VISIBLE_DEVICES unset\), but"),
        ("", None, "hides every GPU"),
    ],
)
def test_too_few_visible_gpus_are_refused(visible: str | None, count: int | None, message: str) -> None:
    location = RankLocation(1, "h", 1, parse_visible(visible), count, 2)
    for asked in (gpu_of, engine_gpu_of):
        with pytest.raises(ValueError, match=message):
            asked(location)


def test_two_torchruns_of_a_host_may_not_overlap() -> None:
    locations = [RankLocation(0, "h", 0, ("0", "1"), None, 1), RankLocation(1, "h", 0, ("1", "2"), None, 1)]
    with pytest.raises(
        ValueError, match=r"rank 0's engine and rank 1 \(local rank 0\) both use GPU 1 of host h: .*parallel.colocate"
    ):
        place(ParallelDims(dp=2, tp=1, pp=1), locations, "cuda")
    apart = [locations[0], replace(locations[1], visible=("2", "3"))]
    assert [each.nodes[0].visible_devices for each in place(ParallelDims(dp=2, tp=1, pp=1), apart, "cuda")] == [
        ("1",),
        ("3",),
    ]


def test_the_plan_shows_both_gpus() -> None:
    dims = ParallelDims(dp=1, tp=2, pp=1)
    locations = planned_locations(dims, 1, 2, "cuda", ("3,1,0,2",), colocate=False)
    assert place(dims, locations, "cuda")[0].nodes[0].cuda_visible_devices == "0,2,3,1"
    assert picture(dims, locations, "cuda")[1] == (
        "  engine 0 node 0: ranks 0, 1 on host0, trainers on GPUs 3,1, engine on GPUs 0,2"
    )
