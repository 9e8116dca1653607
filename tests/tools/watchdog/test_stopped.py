"""Which stopped processes a watchdog reports, and when. Its clock is a number here; the processes are real."""

import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.tools.watchdog.channel import WatchdogSettings
from harness.tools.watchdog.failures import Place
from harness.tools.watchdog.watchdog import LocalRank, Watchdog

LIMIT = 5.0


class Stand:
    """A watchdog with one rank, the process `rank`, which has started the process `engine`."""

    def __init__(self) -> None:
        self.sockets = socket.socketpair()
        self.launcher, self.rank, self.engine = (self._start() for _ in range(3))
        settings = WatchdogSettings(
            host="host0",
            world_size=1,
            local_world_size=1,
            idle_seconds=600.0,
            heartbeat_timeout=10.0,
            stopped_seconds=LIMIT,
        )
        self.watchdog = Watchdog(settings, psutil.Process(self.launcher.pid), self.sockets[0], Path(), None)
        self.watchdog.ranks = [LocalRank(self.sockets[1], moved=0.0, pid=self.rank.pid, rank=0)]
        self.watchdog.ending.descendants.known = {self.engine.pid: psutil.Process(self.engine.pid)}
        self.watchdog.ending.descendants.rank_of = {self.engine.pid: self.rank.pid}

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def look(self, *moments: float) -> list[str]:
        """Return the kinds of failures, and what was stopped, after looks at these moments."""
        for now in moments:
            self.watchdog._look_for_stopped(now)
        return [f"{each.kind} {each.detail}".strip() for each in self.watchdog.own]


@pytest.fixture
def stand() -> Iterator[Stand]:
    made = Stand()
    yield made
    for process in (made.launcher, made.rank, made.engine):
        process.kill()
        process.communicate()
    for each in made.sockets:
        each.close()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Return when the kernel has stopped it."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def test_a_stopped_rank_is_reported_after_the_limit(stand: Stand) -> None:
    stop(stand.rank)
    assert stand.look(1, 2, 3, 4, 5) == []
    assert stand.look(6) == ["stopped"]
    assert stand.look(7, 8) == ["stopped"]


def test_a_stopped_process_of_an_engine_is_reported_with_its_name(stand: Stand) -> None:
    stop(stand.engine)
    name = psutil.Process(stand.engine.pid).name()
    assert stand.look(*range(7)) == [f"stopped engine process {name} (pid {stand.engine.pid})"]


def test_a_process_that_nothing_waits_for_may_be_stopped(stand: Stand) -> None:
    stop(stand.engine)
    for now in range(1, 30):
        stand.watchdog.ranks[0].moved = now - 3.0  # the rank goes from phase to phase
        assert stand.look(now) == []


def test_a_pause_of_the_watchdog_itself_does_not_count(stand: Stand) -> None:
    stop(stand.rank)
    assert stand.look(1, 2, 3600, 3601) == []


def test_a_process_that_continues_counts_from_the_start(stand: Stand) -> None:
    stop(stand.rank)
    assert stand.look(1, 2, 3, 4) == []
    stand.rank.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, stand.rank.pid, os.WCONTINUED | os.WNOWAIT)
    assert stand.look(5) == []
    stop(stand.rank)
    assert stand.look(6, 7, 8, 9, 10) == []


def test_a_job_that_is_stopped_as_a_whole_is_left_alone(stand: Stand) -> None:
    for process in (stand.launcher, stand.rank, stand.engine):
        stop(process)
    assert stand.look(*range(20)) == []


def test_a_process_that_works_is_left_alone(stand: Stand) -> None:
    assert stand.look(*range(20)) == []


def test_the_end_of_torchrun_is_seen_by_the_next_look_with_the_place_of_then(stand: Stand) -> None:
    stand.watchdog._looked = math.inf  # the looks of once a second are not due
    stand.watchdog.ranks[0].moved = math.inf
    stand.watchdog.ranks[0].place = Place(1, "sync", 3, inside=True)
    stand.watchdog.look()
    assert stand.watchdog.own == []
    stand.launcher.kill()
    stand.launcher.wait()
    stand.watchdog.look()
    stand.watchdog.ranks[0].place = Place(2, "generate", 3, inside=True)
    stand.watchdog.look()
    (failure,) = stand.watchdog.own
    assert (failure.kind, str(failure.place)) == ("launcher", "in sync of step 3")
