"""trace.json: valid as Chrome's trace event format says, from events of phases, engine calls and memory."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.runtime.events import EventLog
from harness.tools.export.subject import read_events
from harness.tools.report.trace import spans, trace_events, write_trace
from tests.tools.report.fake_run import fake_run

REQUIRED = {
    "M": {"name", "pid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "C": {"name", "pid", "ts", "args"},
    "i": {"name", "pid", "tid", "ts", "s"},
}
"""Fields that the format requires of each kind of event."""


def check_trace(file: Path) -> list[dict[str, Any]]:
    """Assert what https://ui.perfetto.dev needs to show it; return its events."""
    events = json.loads(file.read_text())
    assert isinstance(events, list)
    for each in events:
        assert REQUIRED[each["ph"]] <= each.keys(), each
        assert isinstance(each["pid"], int) and isinstance(each["name"], str)
        assert all(isinstance(each.get(name, 0), int | float) and each.get(name, 0) >= 0 for name in ("ts", "dur"))
        if each["ph"] == "C":
            assert each["args"] and all(isinstance(value, int | float) for value in each["args"].values())
    for place in {(each["pid"], each["tid"]) for each in events if each["ph"] == "X"}:
        ends: list[float] = []
        mine = [each for each in events if each["ph"] == "X" and (each["pid"], each["tid"]) == place]
        for each in sorted(mine, key=lambda each: (each["ts"], -each["dur"])):
            while ends and ends[-1] <= each["ts"]:
                ends.pop()
            # Complete events of one thread nest, or the later one is not shown.
            assert not ends or each["ts"] + each["dur"] <= ends[-1], each
            ends.append(each["ts"] + each["dur"])
    return events


@pytest.mark.parametrize("passed", [True, False])
def test_every_rank_is_a_process_with_its_phases_and_its_memory(passed: bool, tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", 4, passed=passed)
    recorded = read_events(folder)
    events = check_trace(write_trace(folder, recorded))
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert names == {rank: f"rank {rank} on host0" for rank in range(4)}
    phases = [each for each in events if each["ph"] == "X"]
    began = [each for each in recorded if each["event"] == "phase_start" and each["phase"] != "run"]
    assert len(phases) == len(began)
    first = min(each["time"] for each in recorded)
    generate = next(each for each in began if each["phase"] == "generate" and each["rank"] == 2)
    shown = next(each for each in phases if each["name"] == "generate" and each["pid"] == 2)
    assert shown["ts"] == pytest.approx((generate["time"] - first) * 1e6, abs=1) and shown["args"]["step"] == 0
    assert (sum("outcome" in each["args"] for each in phases) == 0) == passed
    counters = {each["name"]: each["args"] for each in events if each["ph"] == "C" and each["pid"] == 3}
    assert counters["host memory"] == {"rss MiB": 9 * 1024}
    assert counters["GPU memory"].keys() == {"used MiB", "reserved MiB", "engine MiB"}


def engine_call(log: EventLog, name: str, ok: bool = True) -> None:
    """Announce a call as train.py does when it returns."""
    log.fact("engine_call", call=name, seconds=0.0, ok=ok)


def test_calls_of_the_engine_are_inside_their_phases(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events" / "rank1.jsonl", 1, "host0/x/y")
    with log.in_step(0), log.phase("generate"):
        engine_call(log, "generate")
    with log.in_step(1), log.phase("sync"):
        engine_call(log, "ask")
        engine_call(log, "update_weights_from_tensor", ok=False)
    log.fail("RuntimeError: api_key=abcdefghijklmnop")
    log.close()
    events = check_trace(write_trace(tmp_path, read_events(tmp_path)))
    complete = {each["name"]: each for each in events if each["ph"] == "X"}
    for call, phase in (("generate", "generate"), ("ask", "sync"), ("update_weights_from_tensor", "sync")):
        outer = next(each for each in events if each["ph"] == "X" and each["cat"] == "phase" and each["name"] == phase)
        inner = next(each for each in events if each["ph"] == "X" and each["cat"] == "engine" and each["name"] == call)
        assert outer["tid"] != inner["tid"] and inner["args"]["ok"] == (call != "update_weights_from_tensor")
        assert outer["ts"] <= inner["ts"] + 1 and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1
    assert complete.keys() == {"generate", "sync", "ask", "update_weights_from_tensor"}
    (failure,) = [each["name"] for each in events if each["ph"] == "i"]
    assert failure.startswith("failed: RuntimeError") and "abcdefghijklmnop" not in failure


def test_a_run_without_events_has_an_empty_trace(tmp_path: Path) -> None:
    assert check_trace(write_trace(tmp_path, [])) == [] and list(trace_events([])) == []


def event(time: float, name: str, phase: str, step: int | None = None, rank: int = 0) -> dict[str, Any]:
    return {"time": time, "rank": rank, "event": name, "phase": phase, "step": step}


def test_phases_nest_fail_and_stay_open_until_the_run_ended() -> None:
    events = [
        event(10.0, "phase_start", "run"),
        event(11.0, "phase_start", "sync", 0),
        event(11.5, "phase_start", "verify_push", 0),
        event(12.0, "phase_end", "verify_push", 0),
        event(13.0, "phase_failed", "sync", 0),
        event(14.0, "phase_start", "sync", 0, rank=1),
        event(15.0, "phase_failed", "run"),
    ]
    found = [(each.rank, each.phase, each.start, each.end, each.outcome) for each in spans(events, 40.0)]
    assert found == [
        (0, "sync", 1.0, 3.0, "failed"),
        (0, "verify_push", 1.5, 2.0, "ended"),
        (1, "sync", 4.0, 30.0, "open"),
    ]
