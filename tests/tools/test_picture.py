"""Where ranks and engines are, as text."""

from harness.cluster.mesh import ParallelDims
from harness.cluster.network import HostAddress
from harness.cluster.placement import RankLocation, parse_visible
from harness.tools.picture import MOST_LINES, picture


def locations_on(nnodes: int, per_host: int, *visible: str) -> list[RankLocation]:
    """Hosts named host0, host1, ...; visible: CUDA_VISIBLE_DEVICES of each."""
    return [
        RankLocation(node * per_host + local, f"host{node}", local, parse_visible(visible[node] if visible else None))
        for node in range(nnodes)
        for local in range(per_host)
    ]


def test_an_engine_over_two_hosts_with_addresses() -> None:
    addresses = {"host0": HostAddress("eth0", "10.77.0.1", ""), "host1": HostAddress("eth0", "fd77::2", "")}
    dims = ParallelDims(dp=1, tp=4, pp=1)
    assert picture(dims, locations_on(2, 2, "0,1", "2,3"), "cuda", 30000, addresses) == [
        "4 ranks on 2 hosts (cuda), mesh dp=1 tp=4 pp=1, rank order dp,tp,pp",
        "  engine 0 node 0: ranks 0, 1 on host0 (10.77.0.1), GPUs 0,1, ports 30000, 30004 (NCCL), 30008 (rendezvous)",
        "  engine 0 node 1: ranks 2, 3 on host1 (fd77::2), GPUs 2,3, ports 30000, 30004 (NCCL)",
    ]


def test_a_run_on_the_cpu_has_neither_gpus_nor_ports() -> None:
    locations = [RankLocation(rank, f"box/boot/net:[{rank}]", 0, None) for rank in range(2)]
    addresses = {locations[1].host: HostAddress("eth0", "10.0.0.2", "")}
    assert picture(ParallelDims(dp=2, tp=1, pp=1), locations, "cpu", addresses=addresses) == [
        "2 ranks on 2 hosts (cpu), mesh dp=2 tp=1 pp=1, rank order dp,tp,pp",
        "  engine 0 node 0: ranks 0 on box",
        "  engine 1 node 0: ranks 1 on box (10.0.0.2)",
    ]


def test_engines_of_one_host_have_ports_of_their_own() -> None:
    lines = picture(ParallelDims(dp=2, tp=1, pp=1), locations_on(1, 2), "cuda", 30000)
    first, second = (line.partition("ports ")[2].split(",")[0] for line in lines[1:])
    assert first == "30000" and second != first


def test_ranks_and_gpus_are_in_engine_order() -> None:
    lines = picture(ParallelDims(dp=1, tp=2, pp=2), locations_on(1, 4), "cuda")
    assert lines[1] == "  engine 0 node 0: ranks 0, 2, 1, 3 on host0, GPUs 0,2,1,3"


def test_many_engines_are_cut_short() -> None:
    lines = picture(ParallelDims(dp=512, tp=1, pp=1), locations_on(64, 8), "cuda")
    assert len(lines) == MOST_LINES + 1 and lines[-1] == f"  ... {513 - MOST_LINES} more"
