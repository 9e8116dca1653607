"""The phases and the memory of every rank, read from events."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.tools.export.subject import OUTER_PHASES


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One phase of one rank, in seconds since the run's first event."""

    rank: int
    phase: str
    step: int | None
    start: float
    end: float
    """Where it did not end, that of the run."""
    depth: int
    """How many other phases it is in."""
    outcome: str
    """"ended", "failed", or "open" where it did neither."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Memory of one rank at the end of a phase."""

    rank: int
    phase: str
    step: int | None
    at: float
    figures: Mapping[str, int]


def began(events: Sequence[Mapping[str, Any]]) -> float:
    """Return the UNIX seconds of the first event; 0 where there is none."""
    return float(events[0]["time"]) if events else 0.0


def spans(events: Sequence[Mapping[str, Any]], ended: float = 0.0) -> list[Span]:
    """Return the phases of all ranks, without the one that holds all others. ended: UNIX seconds, if after all events."""
    first, last = began(events), max(ended, float(events[-1]["time"]) if events else 0.0)
    opened: dict[int, list[tuple[str, int | None, float]]] = {}
    found = []

    def close(rank: int, place: int, end: float, outcome: str) -> None:
        phase, step, start = opened[rank].pop(place)
        found.append(
            Span(rank=rank, phase=phase, step=step, start=start - first, end=end - first, depth=place, outcome=outcome)
        )

    for each in events:
        kind = each["event"]
        if not kind.startswith("phase_") or each["phase"] in OUTER_PHASES:
            continue
        rank, time = int(each["rank"]), float(each["time"])
        mine = opened.setdefault(rank, [])
        if kind == "phase_start":
            mine.append((each["phase"], each["step"], time))
            continue
        places = [place for place, open_ in enumerate(mine) if open_[:2] == (each["phase"], each["step"])]
        if places:
            close(rank, places[-1], time, "failed" if kind == "phase_failed" else "ended")
    for rank, mine in opened.items():
        while mine:
            close(rank, len(mine) - 1, last, "open")
    return sorted(found, key=lambda each: (each.rank, each.start, each.depth))


def readings(events: Iterable[Mapping[str, Any]], first: float) -> dict[int, list[Reading]]:
    """Return the memory of every rank that read it, in order."""
    found: dict[int, list[Reading]] = {}
    for each in events:
        if each["event"] == "phase_end" and each["phase"] not in OUTER_PHASES and each.get("memory"):
            reading = Reading(
                rank=int(each["rank"]),
                phase=each["phase"],
                step=each["step"],
                at=float(each["time"]) - first,
                figures=each["memory"],
            )
            found.setdefault(reading.rank, []).append(reading)
    return found
