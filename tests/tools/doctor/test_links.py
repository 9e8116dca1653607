import socket
import time

import torch.distributed as dist

from harness.tools.doctor.job_store import JobStore
from harness.tools.doctor.links import all_reduces, open_port, reach_all


def test_a_leased_port_is_reached_and_says_whose_it_is() -> None:
    with open_port(31000, "3") as ports:
        here = (3, "127.0.0.1", ports.dist_init_port)
        other = (4, "127.0.0.1", ports.dist_init_port)
        closed = (5, "127.0.0.1", ports.nccl_port)
        found = reach_all([here, other, closed], 3)
    assert [each.to for each in found] == [3, 4, 5]
    assert found[0].error == ""
    assert found[1].error == "3 answered in its place"  # as behind an address that is this host itself
    assert "refused" in found[2].error.lower() or "Connect call failed" in found[2].error


def test_a_port_that_never_answers_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        began = time.monotonic()
        (found,) = reach_all([(0, "127.0.0.1", deaf.getsockname()[1])], 0.5)
    assert found.error == "no answer within 0 s" or found.error == "no answer within 1 s"
    assert time.monotonic() - began < 3


def test_two_engines_of_a_host_never_have_one_block() -> None:
    with open_port(31000, "a") as one, open_port(31000, "b") as two:
        assert one.port != two.port


def test_an_all_reduce_without_the_other_rank_is_an_error_and_no_hang() -> None:
    began = time.monotonic()
    store = JobStore(dist.HashStore(), 0, 2)
    groups = {"engine": [(0, 1)], "pp": [(1, 2)], "world": [(0, 1)]}
    results = all_reduces(lambda: store, 0, groups, None, time.monotonic() + 1.5)
    assert time.monotonic() - began < 8
    assert [(each.group, bool(each.error)) for each in results] == [("engine", True), ("world", True)]
