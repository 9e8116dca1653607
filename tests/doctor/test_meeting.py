import time

import pytest
import torch.distributed as dist

from harness.doctor.meeting import Absent, Deadline, Meeting, connect, within


def test_what_was_put_is_got_by_any_rank() -> None:
    store = dist.HashStore()
    Meeting(store, 1, 2).put("key", {"a": (1, None)})
    assert Meeting(store, 0, 2).get("key", 1) == {"a": (1, None)}


def test_what_nobody_put_is_absent_in_time() -> None:
    began = time.monotonic()
    with pytest.raises(Absent, match=r"^key did not come within 0\.3 s$"):
        Meeting(dist.HashStore(), 0, 2).get("key", 0.3)
    assert time.monotonic() - began < 2


def test_rank_0_gathers_those_who_came() -> None:
    store = dist.HashStore()
    assert Meeting(store, 2, 3).gather("facts", "c", 0.1) == []
    assert Meeting(store, 0, 3).gather("facts", "a", 0.3) == ["a", None, "c"]


def test_a_barrier_ends_without_the_rank_that_does_not_come() -> None:
    store = dist.HashStore()
    assert not Meeting(store, 0, 2).barrier("here", 0.3)
    assert Meeting(store, 1, 2).barrier("here", 0.3)  # the second, and last


def test_a_function_that_does_not_end_is_left_behind() -> None:
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        within(0.2, lambda: time.sleep(5))
    assert within(5, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 // 0)


def test_a_deadline_that_is_past_still_lets_one_look() -> None:
    assert 0 < Deadline.after(-5).left() < 0.1
    assert Deadline.after(5).left(at_most=1) == 1
    assert Deadline.after(-5).past and not Deadline.after(5).past


def test_without_a_store_the_connection_fails_in_time() -> None:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    began = time.monotonic()
    with pytest.raises(OSError):
        connect(environment, 0.5)
    assert time.monotonic() - began < 5
