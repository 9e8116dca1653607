"""The picture of a world: every rank, builder and GPU list of random shapes; cut short beyond 32 lines; readable."""

from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cluster.mesh import ParallelDims
from harness.cluster.network import HostAddress
from harness.cluster.placement import RankLocation, gpu_of, parse_visible, place
from harness.tools.picture import LAST_LINES, MOST_LINES, host_names, picture, runs

Device = Literal["cpu", "cuda"]
World = tuple[ParallelDims, list[RankLocation], Device]
UUIDS = ",".join(f"GPU-{index:08x}-1111-2222-3333-444444444444" for index in range(8))


def locations_on(nnodes: int, per_host: int, visible: dict[int, str] | str | None = None) -> list[RankLocation]:
    """Hosts named host0, host1, ...; visible: CUDA_VISIBLE_DEVICES of all, or of some by number."""
    values = visible if isinstance(visible, dict) else dict.fromkeys(range(nnodes), visible)
    return [
        RankLocation(node * per_host + local, f"host{node}", local, parse_visible(values.get(node)))
        for node in range(nnodes)
        for local in range(per_host)
    ]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    tp, pp = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    per_host, nnodes = tp * pp * draw(st.integers(1, 2)), draw(st.integers(1, 3))
    visible = draw(st.sampled_from([None, ",".join(str(gpu) for gpu in reversed(range(per_host)))]))
    dims = ParallelDims(dp=per_host * nnodes // tp // pp, tp=tp, pp=pp)
    return dims, locations_on(nnodes, per_host, visible), draw(st.sampled_from(["cpu", "cuda"]))


@settings(deadline=None, max_examples=25)
@given(worlds())
def test_every_rank_and_engine_node_is_there(world: World) -> None:
    dims, locations, device = world
    lines = picture(dims, locations, device, 30000)
    text = " ".join(line.strip() for line in lines)
    assert max(map(len, lines)) <= 120
    assert all(line.isascii() for line in lines)
    if len(lines) > MOST_LINES:
        return
    for location in locations:
        at = dims.coordinates(location.rank)
        gpu = f" GPU {gpu_of(location)}" if device == "cuda" else ""
        where = f"rank {location.rank} dp{at.dp} tp{at.tp} pp{at.pp}{gpu}"
        assert f"{where} |" in text or f"{where} engine" in text or f"{where} {location.host[:4]}" in text
    for engine in place(dims, locations, device):
        for node in engine.nodes:
            head = f"engine {engine.dp} node {node.node_rank} on {node.host}: ranks {runs(node.ranks)}, builder rank"
            others = f" (then {runs([int(gpu) for gpu in node.other_devices])})" if node.other_devices else ""
            gpus = f" CUDA_VISIBLE_DEVICES={','.join(node.visible_devices)}{others}," if node.visible_devices else ""
            assert f"{head} {node.builder},{gpus} port 30" in text


def test_an_engine_over_two_hosts_with_addresses() -> None:
    locations = locations_on(2, 2, {0: "0,1", 1: "2,3"})
    addresses = {"host0": HostAddress("eth0", "10.77.0.1", ""), "host1": HostAddress("eth0", "fd77::2", "")}
    assert picture(ParallelDims(dp=1, tp=4, pp=1), locations, "cuda", 30000, addresses) == [
        "4 ranks on 2 hosts (cuda), mesh dp=1 tp=4 pp=1, rank order dp,tp,pp",
        "  host0 (10.77.0.1)  rank 0 dp0 tp0 pp0 GPU 0 | rank 1 dp0 tp1 pp0 GPU 1",
        "  host1 (fd77::2)  rank 2 dp0 tp2 pp0 GPU 2 | rank 3 dp0 tp3 pp0 GPU 3",
        "    engine 0 node 0 on host0: ranks 0, 1, builder rank 0, CUDA_VISIBLE_DEVICES=0,1, port 30000, nccl 30004,",
        "        rendezvous 30008",
        "    engine 0 node 1 on host1: ranks 2, 3, builder rank 2, CUDA_VISIBLE_DEVICES=2,3, port 30000, nccl 30004",
    ]


def test_a_run_on_the_cpu_has_neither_gpus_nor_ports() -> None:
    locations = [RankLocation(rank, f"box/boot/net:[{rank}]", 0, None) for rank in range(2)]
    addresses = {locations[1].host: HostAddress("eth0", "10.0.0.2", "")}
    assert picture(ParallelDims(dp=2, tp=1, pp=1), locations, "cpu", addresses=addresses) == [
        "2 ranks on 2 hosts (cpu), mesh dp=2 tp=1 pp=1, rank order dp,tp,pp",
        "  box#1  rank 0 dp0 tp0 pp0",
        "  box#2 (10.0.0.2)  rank 1 dp1 tp0 pp0",
        "    engine 0 node 0 on box#1: ranks 0, builder rank 0",
        "    engine 1 node 0 on box#2: ranks 1, builder rank 1",
    ]


def test_hosts_of_one_name_are_numbered() -> None:
    assert host_names(["a/1/x", "b/1/y", "a/2/z"]) == {"a/1/x": "a#1", "b/1/y": "b", "a/2/z": "a#2"}


def test_ranks_are_in_engine_order() -> None:
    lines = picture(ParallelDims(dp=1, tp=2, pp=2), locations_on(1, 4), "cuda", 30000)
    assert "ranks 0, 2, 1, 3, builder rank 0, CUDA_VISIBLE_DEVICES=0,2,1,3," in lines[-2]


def test_own_gpus_are_apart_from_those_behind_them() -> None:
    lines = picture(ParallelDims(dp=4, tp=2, pp=1), locations_on(1, 8, "7,6,5,4,3,2,1,0"), "cuda")
    assert lines[-3:-1] == [
        "    engine 1 node 0 on host0: ranks 2, 3, builder rank 2, CUDA_VISIBLE_DEVICES=5,4 (then 7, 6, 3, 2, 1, 0)",
        "    engine 2 node 0 on host0: ranks 4, 5, builder rank 4, CUDA_VISIBLE_DEVICES=3,2 (then 7, 6, 5, 4, 1, 0)",
    ]
    lines = picture(ParallelDims(dp=4, tp=2, pp=1), locations_on(1, 8, "0,1,2,3,4,5,6,7"), "cuda")
    assert lines[-2].endswith("CUDA_VISIBLE_DEVICES=4,5 (then 0-3, 6, 7)")


def test_512_ranks_are_cut_short() -> None:
    lines = picture(ParallelDims(dp=32, tp=16, pp=1), locations_on(64, 8), "cuda", 30000)
    assert len(lines) == MOST_LINES + 1 and max(map(len, lines)) <= 120
    assert lines[0].startswith("512 ranks on 64 hosts") and "rank 0 dp0 tp0 pp0 GPU 0" in lines[1]
    assert "more lines" in lines[-LAST_LINES - 1] and "engine 31 node 1 on host63: ranks 504-511" in lines[-2]


def test_uuids_have_room() -> None:
    lines = picture(ParallelDims(dp=1, tp=8, pp=1), locations_on(1, 8, UUIDS), "cuda", 30000)
    assert max(map(len, lines)) <= 120
    assert all(sum(uuid in line for line in lines) == 2 for uuid in UUIDS.split(","))
    lines = picture(ParallelDims(dp=2, tp=4, pp=1), locations_on(1, 8, UUIDS), "cuda")
    assert max(map(len, lines)) <= 120
    assert all(sum(uuid in line for line in lines) == 2 for uuid in UUIDS.split(","))
    assert lines[-1].endswith(f"{UUIDS.split(',')[-1]} (then 4 more)")
