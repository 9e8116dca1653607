"""The phases and the memory of every rank, read from events."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.tools.export.subject import OUTER_PHASES

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One phase of one rank, in seconds since the run's first event."""

    rank: int
    phase: str
    step: int | None
    start: float
    end: float  # where it did not end, that of the run
    depth: int  # how many other phases it is in
    outcome: Literal["ended", "failed", "open"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Memory of one rank at the end of a phase."""

    phase: str
    step: int | None
    figures: Mapping[str, int]


def spans(events: Sequence[Event], ended: float = 0.0) -> list[Span]:
    """Return the phases of all ranks, without the one that holds all others. ended: UNIX seconds, if after all events."""
    times = [float(each["time"]) for each in events] or [0.0]
    opened: dict[int, list[Event]] = {}
    found = []

    def close(began: Event, end: float, depth: int, outcome: Literal["ended", "failed", "open"]) -> None:
        place = {name: began[name] for name in ("rank", "phase", "step")}
        start = float(began["time"]) - times[0]
        found.append(Span(**place, start=start, end=end - times[0], depth=depth, outcome=outcome))

    for each in _inner(events):
        mine = opened.setdefault(each["rank"], [])
        if each["event"] == "phase_start":
            mine.append(each)
        elif same := [began for began in mine if (began["phase"], began["step"]) == (each["phase"], each["step"])]:
            outcome: Literal["ended", "failed"] = "failed" if each["event"] == "phase_failed" else "ended"
            close(same[-1], float(each["time"]), mine.index(same[-1]), outcome)
            mine.remove(same[-1])
    for mine in opened.values():
        for depth, began in enumerate(mine):
            close(began, max(ended, times[-1]), depth, "open")
    return sorted(found, key=lambda each: (each.rank, each.start, each.depth))


def readings(events: Iterable[Event]) -> dict[int, list[Reading]]:
    """Return the memory of every rank that read it, in order."""
    found: dict[int, list[Reading]] = {}
    for each in _inner(events):
        if each["event"] == "phase_end" and each.get("memory"):
            reading = Reading(phase=each["phase"], step=each["step"], figures=each["memory"])
            found.setdefault(each["rank"], []).append(reading)
    return found


def _inner(events: Iterable[Event]) -> list[Event]:
    return [each for each in events if each["event"].startswith("phase_") and each["phase"] not in OUTER_PHASES]
