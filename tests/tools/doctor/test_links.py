import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from harness.tools.doctor.job_store import JobStore
from harness.tools.doctor.links import Collective, all_reduces, open_port, reach_all


def test_a_leased_port_is_reached_and_a_closed_one_refuses() -> None:
    with open_port(31000) as ports:
        found = reach_all([(3, "127.0.0.1", ports.dist_init_port), (5, "127.0.0.1", ports.nccl_port)], 3)
    assert [(each.to, each.error) for each in found] == [(3, ""), (5, "Connection refused")]


def test_two_engines_of_a_host_never_have_one_block() -> None:
    with open_port(31000) as one, open_port(31000) as two:
        assert one.port != two.port


def test_an_all_reduce_without_the_other_rank_is_an_error_and_no_hang() -> None:
    began = time.monotonic()
    store = JobStore(dist.HashStore(), 0, 2)
    (found,) = all_reduces(lambda: store, None, time.monotonic() + 1.5)
    assert time.monotonic() - began < 8
    assert found.backend == "gloo" and found.error


def of_two_ranks() -> list[Collective]:
    """All-reduce in two threads."""
    store = dist.HashStore()

    def rank(number: int) -> tuple[Collective, ...]:
        return all_reduces(lambda: JobStore(store, number, 2), None, time.monotonic() + 30)

    with ThreadPoolExecutor(2) as pool:
        return [found for each in pool.map(rank, range(2)) for found in each]


def test_an_all_reduce_is_timed_and_its_sum_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(each.bandwidth > 0 and each.error == "" for each in of_two_ranks())
    monkeypatch.setattr(torch, "full", lambda size, value, device: torch.zeros(size))  # what a broken link may bring
    assert [each.error for each in of_two_ranks()] == ["the sum of 0 to 1 came out as 0 to 0"] * 2
