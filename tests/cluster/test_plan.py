"""Properties of a plan, for random shapes on one or several hosts:

- it says of every rank and engine what ParallelDims and place say;
- no two engine nodes of a host share a port block, and an engine's dist_init_addr is a port of its node 0's block;
- its JSON holds every field, and its table every rank, builder and GPU list, in lines of 120 characters at most.
"""

import json
import time
from dataclasses import asdict
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cluster.mesh import Coordinates, ParallelDims
from harness.cluster.placement import Seat, parse_visible, place
from harness.cluster.plan import Plan, make_plan, plan_as_json, plan_as_table
from harness.cluster.ports import PORTS_PER_ENGINE, planned_ports

UUIDS = ",".join(f"GPU-{index:08x}-1111-2222-3333-444444444444" for index in range(8))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    tp, pp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    engines_per_host, nnodes = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    per_host = tp * pp * engines_per_host
    visible = draw(st.sampled_from([(), (",".join(str(gpu) for gpu in reversed(range(per_host))),)]))
    dims = ParallelDims(dp=engines_per_host * nnodes, tp=tp, pp=pp)
    return make_plan(dims, nnodes, per_host, draw(st.sampled_from(["cpu", "cuda"])), 30000, visible)


@settings(deadline=None)
@given(plans())
def test_the_plan_says_what_mesh_and_placement_say(plan: Plan) -> None:
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
                assert node.cuda_visible_devices == ",".join(str(gpu) for gpu in gpus)


@settings(deadline=None)
@given(plans())
def test_engine_nodes_of_a_host_have_different_blocks(plan: Plan) -> None:
    nodes = [node for engine in plan.engines for node in engine.nodes]
    for one, other in combinations(nodes, 2):
        assert one.host != other.host or abs(one.ports.port - other.ports.port) >= PORTS_PER_ENGINE
    for engine in plan.engines:
        first = engine.nodes[0]
        assert engine.dist_init_addr == f"{first.host}:{first.ports.dist_init_port}"


@settings(deadline=None)
@given(plans())
def test_json_holds_every_field(plan: Plan) -> None:
    assert json.loads(plan_as_json(plan)) == json.loads(json.dumps(asdict(plan)))


@settings(deadline=None)
@given(plans())
def test_table_shows_every_rank_and_engine_node(plan: Plan) -> None:
    table = plan_as_table(plan)
    assert max(map(len, table.splitlines())) <= 120
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines() if "|" in line]
    for rank in plan.ranks:
        gpu = "-" if rank.gpu is None else rank.gpu
        numbers = (rank.rank, rank.dp, rank.tp, rank.pp, rank.host, rank.local_rank, gpu)
        assert [str(number) for number in numbers] in rows
    nodes = [(engine, node) for engine in plan.engines for node in engine.nodes]
    shown = [row for row in rows if len(row) == 10 and row[0].isdigit()]
    assert len(shown) == len(nodes)
    for row, (engine, node) in zip(shown, nodes, strict=True):
        assert row[:3] == [str(engine.dp), str(node.node_rank), node.host]
        assert row[4] == str(node.builder)
        assert row[7:] == [str(node.ports.port), str(node.ports.nccl_port), engine.dist_init_addr]


def test_an_engine_over_two_hosts() -> None:
    plan = make_plan(ParallelDims(dp=1, tp=4, pp=1), 2, 2, "cuda", 40000, ("0,1", "2,3"))
    [engine] = plan.engines
    assert [(node.host, node.node_rank, node.builder, node.cuda_visible_devices) for node in engine.nodes] == [
        ("host0", 0, 0, "0,1"),
        ("host1", 1, 2, "2,3"),
    ]
    assert engine.dist_init_addr == f"host0:{planned_ports(40000, 0).dist_init_port}"


def test_two_engines_on_a_host_as_the_table_shows_them() -> None:
    plan = make_plan(ParallelDims(dp=2, tp=4, pp=1), 1, 8, "cuda", 30000)
    assert plan_as_table(plan).splitlines()[-4:] == [
        "dp | node | host  | ranks | builder | CUDA_VISIBLE_DEVICES | base | port  | nccl  | dist_init",
        "---+------+-------+-------+---------+----------------------+------+-------+-------+------------",
        "0  | 0    | host0 | 0-3   | 0       | 0,1,2,3              | 0    | 30000 | 30004 | host0:30008",
        "1  | 0    | host0 | 4-7   | 4       | 4,5,6,7              | 0    | 30032 | 30036 | host0:30040",
    ]


def test_ranks_out_of_order_are_shown_in_engine_order() -> None:
    table = plan_as_table(make_plan(ParallelDims(dp=1, tp=2, pp=2), 1, 4, "cuda", 30000))
    assert "| 0, 2, 1, 3 |" in table
    assert "| 0,2,1,3 " in table


@pytest.mark.parametrize("visible", [(), (UUIDS,)])
def test_512_ranks_stay_readable_and_quick(visible: tuple[str, ...]) -> None:
    dims = ParallelDims(dp=64, tp=8, pp=1)
    plan_as_table(make_plan(ParallelDims(dp=1, tp=1, pp=1), 1, 1, "cpu", 30000))  # imports rich
    begin = time.process_time()
    plan = make_plan(dims, 64, 8, "cuda", 30000, visible)
    table, as_json = plan_as_table(plan), plan_as_json(plan)
    assert time.process_time() - begin < 1.0
    lines = table.splitlines()
    assert max(map(len, lines)) <= 120
    # A row for each rank, and one for each engine, or one for each of its UUIDs.
    assert sum("host" in line and "|" in line for line in lines) == 512 + 64 + 2
    assert len(lines) == 1 + (3 + 512) + (3 + 64 * (8 if visible else 1))
    assert len(json.loads(as_json)["ranks"]) == 512
    if visible:
        assert all(table.count(uuid) == 64 * 2 for uuid in UUIDS.split(","))


def test_no_colours_whatever_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(ParallelDims(dp=1, tp=2, pp=1), 1, 2, "cuda", 30000)
    plain = plan_as_table(plan)
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "40", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    assert plan_as_table(plan) == plain
    assert "\x1b" not in plain
    assert plain.isascii()


@pytest.mark.parametrize(
    ("nnodes", "nproc", "visible", "message"),
    [
        (1, 4, (), r"2 \* 4 \* 1 = 8, but the world size is 4"),
        (0, 8, (), "--nnodes = 0 starts no rank: it must be 1 or more"),
        (1, 0, (), "--nproc-per-node = 0 starts no rank"),
        (
            2,
            4,
            ("0,1,2,3", None, None),
            "CUDA_VISIBLE_DEVICES is given for 3 hosts but --nnodes = 2: give none, one for",
        ),
        (2, 4, ("0,1,0,1",), "'0,1,0,1' lists GPU 0 twice"),
        (2, 4, ("0,1,2",), "rank 3 on host host0 has local rank 3 but sees 3 GPUs"),
        (2, 4, ("0,1,2,3", "2"), "rank 4 and rank 5 .* both use GPU 2 of host host1"),
        (2, 4, (None, ""), "rank 4 on host host1 has CUDA_VISIBLE_DEVICES='', which hides every GPU"),
        (4, 2, (), ""),
    ],
)
def test_errors_are_those_of_mesh_and_placement(
    nnodes: int, nproc: int, visible: tuple[str | None, ...], message: str
) -> None:
    dims = ParallelDims(dp=2, tp=4, pp=1)
    if not message:
        assert len(make_plan(dims, nnodes, nproc, "cuda", 30000, visible).engines[0].nodes) == 2
        return
    with pytest.raises(ValueError, match=message):
        make_plan(dims, nnodes, nproc, "cuda", 30000, visible)


def test_ports_past_the_last_are_refused() -> None:
    with pytest.raises(ValueError, match="engine.base_port = 65480 leaves no 32 ports up to 65535 for engine 1"):
        make_plan(ParallelDims(dp=2, tp=1, pp=1), 1, 2, "cpu", 65480)


def test_the_plan_is_what_the_seats_would_give() -> None:
    dims = ParallelDims(dp=1, tp=4, pp=2, rank_order="dp,pp,tp")
    plan = make_plan(dims, 2, 4, "cuda", 30000, ("3,1,0,2", UUIDS))
    seats = [
        Seat(4 * host + local_rank, f"host{host}", local_rank, parse_visible(shown))
        for host, shown in enumerate(("3,1,0,2", UUIDS))
        for local_rank in range(4)
    ]
    [expected] = place(dims, seats, "cuda")
    assert [(n.ranks, n.builder, n.cuda_visible_devices, n.base_gpu_id) for n in plan.engines[0].nodes] == [
        (n.ranks, n.builder, ",".join(n.visible_devices or ()), n.base_gpu_id) for n in expected.nodes
    ]
