"""What a rank does and says. One list of phases: what the code begins is in it, and the other way round."""

import io
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from harness.observer import Observer, Observers
from harness.runtime import events
from harness.runtime.events import MEET, PHASES, RUN, Console, EventLog, current_work, unix_seconds

HARNESS = Path(__file__).resolve().parents[2] / "harness"


def test_every_phase_can_have_a_deadline() -> None:
    """Names are constants, or f"..._{role}" for each model that learns."""
    text = "".join(file.read_text() for file in HARNESS.rglob("*.py"))
    found = re.findall(r"\bphase\(f?\"(\w+?)(_\{role\})?\"", text)
    begun = {f"{name}_{each}" if role else name for name, role in found for each in ("actor", "critic")}
    assert begun | {RUN, MEET} == set(PHASES)
    assert len(set(PHASES)) == len(PHASES)


class Voice:
    def __init__(self) -> None:
        self.spoke, self.said = 0.0, list[str]()

    def say(self, text: str) -> None:
        self.spoke = time.monotonic()
        self.said.append(text)


def wait_for(voice: Voice, text: str) -> None:
    until = time.monotonic() + 60
    while not any(text in line for line in voice.said):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_innermost_work_is_named_while_nothing_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "EVERY_SECONDS", 0.05)
    voice = Voice()
    with events.working("outer", voice) as outer:
        wait_for(voice, "outer (0 s so far)")
        with events.working("inner"):
            wait_for(voice, "inner")
            work = current_work()
            assert work is not None and work.what == "inner"
        voice.said.clear()
        outer.what = "2 of 3"
        wait_for(voice, "2 of 3")
    said = len(voice.said)
    assert current_work() is None
    time.sleep(0.2)
    assert len(voice.said) == said


def test_a_short_work_is_quiet_and_a_long_one_speaks_where_standard_error_went(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with events.working("short"):
        pass
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(events, "EVERY_SECONDS", 0.02)
    said = ""
    until = time.monotonic() + 60
    with events.working("long"):
        while "long (0 s so far)" not in said:
            assert time.monotonic() < until
            out, error = capfd.readouterr()
            said += error
            assert out == ""


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def log_at(path: Path, console: Console | None = None) -> EventLog:
    return EventLog(path / "events" / "rank3.jsonl", 3, "here", console)


def test_a_fact_is_one_line_with_time_rank_and_host(tmp_path: Path) -> None:
    log = log_at(tmp_path)
    before = unix_seconds()
    log.fact("sample", text="two\nlines", folder=tmp_path)
    assert len(lines(log.path)) == 1, "at once"
    log.close()
    log.fact("again")
    log.close()
    first, second = lines(log.path)
    assert before <= first.pop("time") <= unix_seconds()
    assert first == {"rank": 3, "host": "here", "event": "sample", "text": "two\nlines", "folder": str(tmp_path)}
    assert second["event"] == "again"


def test_a_clock_that_is_set_back_moves_no_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    log = log_at(tmp_path, Console(stream, launched=unix_seconds()))
    log.say("one")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    log.say("two")
    first, second = lines(log.path)
    assert first["time"] <= second["time"]
    assert "[-" not in stream.getvalue()


def test_threads_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    log = log_at(tmp_path)

    def write(thread: int) -> None:
        for number in range(200):
            log.fact("n", thread=thread, number=number, padding="x" * 500)

    threads = [threading.Thread(target=write, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    seen = [(line["thread"], line["number"]) for line in lines(log.path)]
    assert len(seen) == 800
    for index in range(4):
        assert [number for thread, number in seen if thread == index] == list(range(200))


def test_a_phase_has_a_start_an_end_seconds_and_memory(tmp_path: Path) -> None:
    log = log_at(tmp_path)
    for step in range(2):
        with log.in_step(step), log.phase("sync"):
            time.sleep(0.02)
    log.close()
    start, end, *_ = lines(log.path)
    assert (start["event"], start["phase"], start["step"]) == ("phase_start", "sync", 0)
    assert (end["event"], end["phase"], end["step"], end["memory"]) == ("phase_end", "sync", 0, {})
    assert end["seconds"] >= 0.02
    assert log.seconds["sync"][0] == end["seconds"] and len(log.seconds["sync"]) == 2


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt("no")])
def test_a_failed_phase_says_so_and_does_not_end(error: BaseException, tmp_path: Path) -> None:
    log = log_at(tmp_path)
    with pytest.raises(type(error)), log.in_step(1), log.phase("sync"):
        raise error
    log.close()
    assert [line["event"] for line in lines(log.path)] == ["phase_start", "phase_failed"]
    assert lines(log.path)[1]["error"] == f"{type(error).__name__}: no"
    assert log.seconds == {}


def test_a_long_phase_says_what_it_waits_for_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "EVERY_SECONDS", 0.1)
    stream = io.StringIO()
    log = log_at(tmp_path, Console(stream, launched=time.time() - 100))
    before, deadline = set(threading.enumerate()), time.monotonic() + 60
    with log.in_step(0), log.phase("sync", waiting_for="all ranks"):
        while len(stream.getvalue().splitlines()) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    log.close()
    while not set(threading.enumerate()) <= before:
        assert time.monotonic() < deadline, "nobody may be left to say more"
        time.sleep(0.01)
    said = stream.getvalue().splitlines()
    assert len(said) >= 2
    assert all(re.fullmatch(r"\[ 1\d\d\.\d s\] sync: waiting for all ranks \(\d+ s so far\)", line) for line in said)


def test_what_is_said_is_a_fact_on_every_rank_and_on_the_console_of_one(tmp_path: Path) -> None:
    stream = io.StringIO()
    log = log_at(tmp_path, Console(stream, launched=time.time()))
    log.say("hello")
    log_at(tmp_path).say("quiet")
    log.close()
    assert [(line["event"], line["text"]) for line in lines(log.path)] == [("say", "hello"), ("say", "quiet")]
    Console(stream, launched=0.0).show("a table\n\n")  # without a time
    assert re.fullmatch(r"\[   \d\.\d s\] hello\na table\n", stream.getvalue())


class Watcher(Observer):
    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def phase_begins(self, phase: str, step: int | None) -> None:
        self.calls.append(("begins", phase))

    def phase_ends(self, phase: str, step: int | None) -> None:
        self.calls.append(("ends", phase))

    def phase_fails(self, phase: str, step: int | None) -> None:
        self.calls.append(("fails", phase))

    def failed(self, error: str, traceback: str) -> None:
        self.calls.append(("failed", error, traceback))


def test_observers_are_called_around_phases_and_at_a_failure_each_in_order(tmp_path: Path) -> None:
    first, second = Watcher(), Watcher()
    log = EventLog(tmp_path / "rank3.jsonl", 3, "here", watcher=Observers([first, second]))
    with log.in_step(0), log.phase("sync"):
        assert first.calls == second.calls == [("begins", "sync")]
    with pytest.raises(ValueError, match="no"), log.in_step(0), log.phase("generate"):
        raise ValueError("no")
    log.fail("ValueError: no", traceback="where")
    assert first.calls[1:3] == [("ends", "sync"), ("begins", "generate")]
    assert first.calls[3:] == [("fails", "generate"), ("failed", "ValueError: no", "where")]
    assert first.calls == second.calls
    last = lines(log.path)[-1]
    assert (last["event"], last["error"], last["traceback"]) == ("failed", "ValueError: no", "where")
