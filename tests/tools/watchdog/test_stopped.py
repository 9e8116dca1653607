"""Which stopped processes a watchdog reports, and when. Its clock is a number here; the processes are real."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from harness.tools.watchdog import watchdog
from harness.tools.watchdog.channel import WatchdogSettings
from harness.tools.watchdog.failures import Place
from harness.tools.watchdog.watchdog import LocalRank, Watchdog

LIMIT = 5.0


class Stand:
    """A watchdog with one rank, the process `rank`, which has started the process `engine`."""

    now = 0.0

    def __init__(self) -> None:
        self.sockets = socket.socketpair()
        self.launcher, self.rank, self.engine = (self._start() for _ in range(3))
        settings = WatchdogSettings(
            host="host0",
            world_size=1,
            local_world_size=1,
            heartbeat_timeout=10.0,
            stopped_seconds=LIMIT,
        )
        self.watchdog = Watchdog(settings, psutil.Process(self.launcher.pid), self.sockets[0], None)
        self.watchdog.ranks = [LocalRank(self.sockets[1], moved=0.0, pid=self.rank.pid, rank=0)]
        self.watchdog.cleanup.descendants.known = {self.engine.pid: psutil.Process(self.engine.pid)}
        self.watchdog.cleanup.descendants.rank_of = {self.engine.pid: self.rank.pid}

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def look(self, *moments: float) -> list[str]:
        """Return the kinds of failures, and what was stopped, after looks at these moments."""
        for now in moments:
            self.now = now * 1.001  # looks for what is stopped are more than a second apart
            self.watchdog.look()
        return [f"{each.kind} {each.error}".strip() for each in self.watchdog.own]


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    made = Stand()
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: made.now))
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


def test_a_job_that_is_stopped_as_a_whole_is_left_alone(stand: Stand) -> None:
    for process in (stand.launcher, stand.rank, stand.engine):
        stop(process)
    assert stand.look(*range(20)) == []


def test_the_end_of_torchrun_is_seen_by_the_next_look_with_the_place_of_then(stand: Stand) -> None:
    stand.watchdog.ranks[0].place = Place(1, "sync", 3, inside=True)
    assert stand.look(0.1) == []
    stand.launcher.kill()
    stand.launcher.wait()
    stand.look(0.2)
    stand.watchdog.ranks[0].place = Place(2, "generate", 3, inside=True)
    stand.look(0.3)
    (failure,) = stand.watchdog.own
    assert (failure.kind, failure.where) == ("launcher", "in sync of step 3")
