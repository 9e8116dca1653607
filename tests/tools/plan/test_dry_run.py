"""Properties of a plan, for random shapes on one or several hosts:

- it says of every rank and engine what ParallelDims and place say;
- no two engine nodes of a host share a port block, and an engine's dist_init_addr is a port of its node 0's block.
"""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cluster.mesh import Coordinates, ParallelDims
from harness.cluster.placement import RankLocation, parse_visible, place
from harness.cluster.ports import PORTS_PER_ENGINE, planned_ports
from harness.tools.plan.dry_run import PlacementPlan, plan_placement

UUIDS = ",".join(f"GPU-{index:08x}-1111-2222-3333-444444444444" for index in range(8))


@st.composite
def plans(draw: st.DrawFn) -> PlacementPlan:
    tp, pp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    engines_per_host, nnodes = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    per_host = tp * pp * engines_per_host
    visible = draw(st.sampled_from([(), (",".join(str(gpu) for gpu in reversed(range(per_host))),)]))
    dims = ParallelDims(dp=engines_per_host * nnodes, tp=tp, pp=pp)
    return plan_placement(dims, nnodes, per_host, draw(st.sampled_from(["cpu", "cuda"])), 30000, visible)


@settings(deadline=None, max_examples=25)
@given(plans())
def test_the_plan_says_what_mesh_and_placement_say(plan: PlacementPlan) -> None:
    assert [rank.rank for rank in plan.ranks] == list(range(plan.dims.world_size))
    for rank in plan.ranks:
        assert Coordinates(rank.dp, rank.tp, rank.pp) == plan.dims.coordinates(rank.rank)
        assert (rank.host, rank.local_rank) == (
            f"host{rank.rank // plan.nproc_per_node}",
            rank.rank % plan.nproc_per_node,
        )
    for engine in plan.engines:
        assert tuple(rank for node in engine.nodes for rank in node.ranks) == plan.dims.engine_ranks(engine.dp)
        for node in engine.nodes:
            gpus = [plan.ranks[rank].gpu for rank in node.ranks]
            if plan.device == "cpu":
                assert (node.cuda_visible_devices, set(gpus)) == (None, {None})
            else:
                seen = parse_visible(node.cuda_visible_devices) or ()
                assert list(seen[: len(gpus)]) == gpus
                assert sorted(seen) == sorted(str(rank.gpu) for rank in plan.ranks if rank.host == node.host)


@settings(deadline=None, max_examples=25)
@given(plans())
def test_engine_nodes_of_a_host_have_different_blocks(plan: PlacementPlan) -> None:
    nodes = [node for engine in plan.engines for node in engine.nodes]
    for one, other in combinations(nodes, 2):
        assert one.host != other.host or abs(one.ports.port - other.ports.port) >= PORTS_PER_ENGINE
    for engine in plan.engines:
        first = engine.nodes[0]
        assert engine.dist_init_addr == f"{first.host}:{first.ports.dist_init_port}"


def test_an_engine_over_two_hosts() -> None:
    plan = plan_placement(ParallelDims(dp=1, tp=4, pp=1), 2, 2, "cuda", 40000, ("0,1", "2,3"))
    [engine] = plan.engines
    assert [(node.host, node.node_rank, node.builder, node.cuda_visible_devices) for node in engine.nodes] == [
        ("host0", 0, 0, "0,1"),
        ("host1", 1, 2, "2,3"),
    ]
    assert engine.dist_init_addr == f"host0:{planned_ports(40000, 0).dist_init_port}"


@pytest.mark.parametrize(
    ("nnodes", "nproc", "visible", "message"),
    [
        (1, 4, (), r"2 \* 4 \* 1 = 8, but the world size is 4"),
        (2, 4, ("0,1,0,1",), "'0,1,0,1' lists GPU 0 twice"),
        (2, 4, ("0,1,2",), "rank 3 on host host0 has local rank 3 but sees 3 GPUs"),
        (2, 4, ("0,1,2,3", "2"), "rank 4 .* and rank 5 .* both use GPU 2 of host host1"),
        (2, 4, (None, ""), "rank 4 on host host1 has CUDA_VISIBLE_DEVICES='', which hides every GPU"),
        (4, 2, (), ""),
    ],
)
def test_errors_are_those_of_mesh_and_placement(
    nnodes: int, nproc: int, visible: tuple[str | None, ...], message: str
) -> None:
    dims = ParallelDims(dp=2, tp=4, pp=1)
    if not message:
        assert len(plan_placement(dims, nnodes, nproc, "cuda", 30000, visible).engines[0].nodes) == 2
        return
    with pytest.raises(ValueError, match=message):
        plan_placement(dims, nnodes, nproc, "cuda", 30000, visible)


def test_ports_past_the_last_are_refused() -> None:
    with pytest.raises(ValueError, match="engine.base_port = 65480 leaves no 32 ports up to 65535 for engine 1"):
        plan_placement(ParallelDims(dp=2, tp=1, pp=1), 1, 2, "cpu", 65480)


def test_the_plan_is_what_the_seats_would_give() -> None:
    dims = ParallelDims(dp=1, tp=4, pp=2, rank_order="dp,pp,tp")
    plan = plan_placement(dims, 2, 4, "cuda", 30000, ("3,1,0,2", UUIDS))
    locations = [
        RankLocation(4 * host + local_rank, f"host{host}", local_rank, parse_visible(shown))
        for host, shown in enumerate(("3,1,0,2", UUIDS))
        for local_rank in range(4)
    ]
    [expected] = place(dims, locations, "cuda")
    assert [(n.ranks, n.builder, n.cuda_visible_devices, n.base_gpu_id) for n in plan.engines[0].nodes] == [
        (n.ranks, n.builder, n.cuda_visible_devices, n.base_gpu_id) for n in expected.nodes
    ]
