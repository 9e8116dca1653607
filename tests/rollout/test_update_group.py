"""How two calls that need each other end when one fails; tests/weights/test_transports_real.py has real engines."""

import gc
import threading
import weakref

import pytest

from harness.rollout.update_group import side_by_side


class Connection:
    """What both sides wait on until it is closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()

    def wait(self) -> None:
        assert self.closed.wait(20)
        raise ConnectionError("closed by peer")


def refuse() -> None:
    raise ValueError("refused")


def test_ours_is_returned_when_both_have_returned() -> None:
    met = threading.Barrier(2, timeout=20)  # one after the other would never meet
    assert side_by_side(met.wait, lambda: (met.wait(), "ours")[1], 20, refuse) == "ours"


@pytest.mark.parametrize("who", ["theirs", "ours"])
def test_the_first_failure_is_raised_and_frees_the_other_side(who: str) -> None:
    connection = Connection()
    sides = (refuse, connection.wait) if who == "theirs" else (connection.wait, refuse)
    with pytest.raises(ValueError, match="refused"):
        side_by_side(*sides, 20, connection.close)
    assert connection.closed.is_set()


def test_a_side_that_cannot_be_freed_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.rollout.update_group.GRACE_SECONDS", 0.1)
    connection = Connection()
    with pytest.raises(ValueError, match="refused"):
        side_by_side(refuse, connection.wait, 20, lambda: None)
    assert "update-group-trainer" in {thread.name for thread in threading.enumerate()}
    connection.close()


def test_sides_that_wait_for_ever_time_out_and_are_named() -> None:
    connection = Connection()
    with pytest.raises(TimeoutError, match="the engine's call and the trainer's side took more than 0 s"):
        side_by_side(connection.wait, connection.wait, 0.1, connection.close)
    connection = Connection()
    with pytest.raises(TimeoutError, match="^the trainer's side took more than"):
        side_by_side(lambda: None, connection.wait, 1.0, connection.close)


def test_a_failure_keeps_nothing_alive_that_the_call_held() -> None:
    """Or the connection that the engine waits on would stay open as long as the error is looked at."""
    held: list[weakref.ref[Connection]] = []

    def ours() -> None:
        connection = Connection()
        held.append(weakref.ref(connection))
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused") as caught:
        side_by_side(lambda: None, ours, 20, lambda: None)
    gc.collect()
    assert caught.value.__traceback__ is not None
    assert held[0]() is None
