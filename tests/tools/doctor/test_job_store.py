import base64
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from harness.tools.doctor.job_store import Absent, JobStore, connect, left, within
from harness.tools.doctor.rank_facts import RankFacts
from tests.tools.doctor.examples import facts_of


def test_what_nobody_put_is_absent_in_time() -> None:
    began = time.monotonic()
    with pytest.raises(Absent, match=r"^key did not come within 0\.3 s$"):
        JobStore(dist.HashStore(), 0, 2).get("key", 0.3, str)
    assert time.monotonic() - began < 2


def test_rank_0_gathers_those_who_came() -> None:
    store = dist.HashStore()
    assert JobStore(store, 2, 3).gather("facts", "c", 0.1, str) == []
    assert JobStore(store, 0, 3).gather("facts", "a", 0.3, str) == ["a", None, "c"]


def test_a_barrier_ends_without_the_rank_that_does_not_come() -> None:
    store = dist.HashStore()
    began = time.monotonic()
    JobStore(store, 0, 2).barrier("here", 0.3)
    assert 0.3 <= time.monotonic() - began < 5
    JobStore(store, 1, 2).barrier("here", 60)  # the second, and last
    assert time.monotonic() - began < 10


def test_a_function_that_does_not_end_is_left_behind() -> None:
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        within(0.2, lambda: time.sleep(5))
    assert within(5, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 // 0)


def test_a_deadline_that_is_past_still_lets_one_look() -> None:
    now = time.monotonic()
    assert 0 < left(now - 5) < 0.1
    assert left(now + 5, at_most=1) == 1


def test_without_a_store_the_connection_fails_in_time() -> None:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    began = time.monotonic()
    with pytest.raises(OSError):
        connect(environment, 0.5)
    assert time.monotonic() - began < 5


class Exploit:
    """What an outsider sets in the store: unpickling it writes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.path, "w"))


def test_a_pickle_in_the_store_is_refused_and_not_run(tmp_path: Path) -> None:
    store, planted = dist.HashStore(), tmp_path / "planted"
    for pickled in (pickle.dumps(Exploit(str(planted))), base64.b64encode(pickle.dumps(Exploit(str(planted))))):
        store.set("facts/1", pickled.decode("latin-1"))
        with pytest.raises(Absent, match="facts/1"):
            JobStore(store, 0, 2).get("facts/1", 1, RankFacts)
        assert not planted.exists()


@pytest.mark.parametrize("value", ["", "null", "{}", "[1]", '{"rank": "0"}', "[" * 100_000, "\x00", '{"rank": 1}'])
def test_a_value_of_another_type_is_that_of_no_rank(value: str) -> None:
    store = dist.HashStore()
    store.set("facts/1", value)
    mine = facts_of(0, 2, gpus=True)
    assert JobStore(store, 0, 2).gather("facts", mine, 1, RankFacts) == [mine, None]
