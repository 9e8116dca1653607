from typing import Any

from harness.tools.report.run_history import readings, spans


def event(time: float, name: str, phase: str, step: int | None = None, rank: int = 0, **more: Any) -> dict[str, Any]:
    return {"time": time, "rank": rank, "event": name, "phase": phase, "step": step} | more


EVENTS = [
    event(10.0, "phase_start", "run"),
    event(11.0, "phase_start", "sync", 0),
    event(11.5, "phase_start", "verify_push", 0),
    event(12.0, "phase_end", "verify_push", 0, memory={"rss": 5}),
    event(13.0, "phase_failed", "sync", 0),
    event(14.0, "phase_start", "sync", 0, rank=1),
    event(15.0, "phase_failed", "run"),
]


def test_phases_nest_fail_and_stay_open_until_the_run_ended() -> None:
    found = [(each.rank, each.phase, each.start, each.end, each.depth, each.outcome) for each in spans(EVENTS, 40.0)]
    assert found == [
        (0, "sync", 1.0, 3.0, 0, "failed"),
        (0, "verify_push", 1.5, 2.0, 1, "ended"),
        (1, "sync", 4.0, 30.0, 0, "open"),
    ]


def test_memory_is_read_where_a_phase_ended() -> None:
    (reading,) = readings(EVENTS)[0]
    assert (reading.phase, reading.step, reading.figures) == ("verify_push", 0, {"rss": 5})
