"""Where the ranks of a planned run are, and what cannot be planned."""

import pytest

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import RankLocation, engine_gpu_of, gpu_of
from harness.tools.picture import picture
from harness.tools.plan.dry_run import planned_locations


def test_ranks_fill_one_host_after_the_other() -> None:
    found = planned_locations(ParallelDims(dp=1, tp=4, pp=1), 2, 2, "cuda", ("0,1", "3,2"))
    assert found == [
        RankLocation(2 * host + local, f"host{host}", local, visible)
        for host, visible in enumerate([("0", "1"), ("3", "2")])
        for local in range(2)
    ]


def test_hosts_without_a_list_have_the_gpus_that_the_ranks_need() -> None:
    dims = ParallelDims(dp=1, tp=2, pp=1)
    assert {each.gpu_count for each in planned_locations(dims, 1, 2, "cuda")} == {2}
    apart = planned_locations(dims, 1, 2, "cuda", colocate=False)
    assert [(gpu_of(each), engine_gpu_of(each)) for each in apart] == [("0", "2"), ("1", "3")]
    assert planned_locations(dims, 1, 2, "cpu", colocate=False) == planned_locations(dims, 1, 2, "cpu")


def test_one_list_is_for_all_hosts() -> None:
    found = planned_locations(ParallelDims(dp=2, tp=2, pp=1), 2, 2, "cuda", ("5,4",))
    assert [gpu_of(each) for each in found] == ["5", "4", "5", "4"]


def test_ports_past_the_last_are_refused() -> None:
    dims = ParallelDims(dp=2, tp=1, pp=1)
    with pytest.raises(ValueError, match="engine.base_port = 65480 is too high: engine 1 of the host needs 32 ports"):
        picture(dims, planned_locations(dims, 1, 2, "cpu"), "cpu", 65480)
