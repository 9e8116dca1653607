"""How far a rank has come, which time limit of its phases passes first, and that it waits for its watchdog."""

import math
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from harness.runtime import files
from harness.runtime.events import RUN
from harness.tools.watchdog import channel, client
from harness.tools.watchdog.channel import LONGEST_MESSAGE, Met, WatchdogSettings, parse
from harness.tools.watchdog.client import OpenPhases, WatchdogObserver


def seconds_left(phases: OpenPhases) -> float:
    due, _ = phases.due()
    assert due is not None
    return due - time.monotonic()


def test_the_limit_that_passes_first_counts_and_the_job_has_none_by_itself() -> None:
    phases = OpenPhases({"sync": 7.0}, 600.0)
    phases.begin(RUN, None)
    assert seconds_left(phases) == pytest.approx(600, abs=5), "between two phases"
    phases.begin("save", 1)
    phases.begin("sync", 1)
    assert seconds_left(phases) == pytest.approx(7, abs=5) and phases.due()[1] == 7.0
    phases.end("sync")
    assert seconds_left(phases) == pytest.approx(600, abs=5)
    phases.begin("sync", 0)
    phases.close("sync")  # it failed, and that was caught
    phases.end("save")
    assert phases.due()[1] == 600.0
    limited = OpenPhases({RUN: 9.0}, 600.0)
    limited.begin(RUN, None)
    assert limited.due()[1] == 9.0


def test_a_rank_is_in_the_innermost_phase_also_while_an_exception_leaves_it() -> None:
    phases = OpenPhases({}, 600.0)
    assert str(phases.place) == "before its first phase"
    for call, phase, place in (
        (phases.begin, (RUN, None), "before its first phase"),
        (phases.begin, ("save", 1), "in save of step 1"),
        (phases.begin, ("sync", 1), "in sync of step 1"),
        (phases.end, ("sync",), "in save of step 1"),
        (phases.begin, ("sync", 1), "in sync of step 1"),
        (phases.close, ("sync",), "in sync of step 1"),
        (phases.close, ("save",), "in sync of step 1"),
        (phases.end, (RUN,), "after sync of step 1"),
    ):
        call(*phase)
        assert str(phases.place) == place
    assert phases.place.progress == 6, "phases begun and ended; one that failed has not ended"


def test_ranks_that_have_met_wait_for_a_watchdog_that_starts_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """If they went on, and ended before it has seen them, nobody could say how."""
    listeners: list[socket.socket] = []

    def listen_only(settings: WatchdogSettings) -> int:
        listeners.append(channel.listen(settings.name))
        return 0

    monkeypatch.setattr(client, "_start_watchdog", listen_only)
    monkeypatch.setenv(client.MARK, "")
    settings = WatchdogSettings(
        host="host0", world_size=1, local_world_size=1, heartbeat_timeout=10.0, stopped_seconds=60.0
    )
    observer = WatchdogObserver()
    observer.connect(0, 0, OpenPhases({}, math.inf), settings)
    meeting = threading.Thread(target=observer.meet, args=([replace(observer.own)], Path("runs"), "host0"))
    try:
        meeting.start()
        line, _ = listeners[0].accept()
        while not isinstance(parse(line.recv(LONGEST_MESSAGE)), Met):
            pass
        meeting.join(0.2)
        assert meeting.is_alive()
        line.send(b'{"done": true}')
        meeting.join(10)
        assert not meeting.is_alive()
        observer.finished(0)
        line.close()
    finally:
        listeners[0].close()
        files.remove_run_folders(observer.own.watchdog)
