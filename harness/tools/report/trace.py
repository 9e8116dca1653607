"""trace.json: what every rank did and when, for https://ui.perfetto.dev or chrome://tracing.

Chrome's trace event format as a JSON array: one process for each rank, with threads for its phases, for the calls of
its engine and for its start (launcher, imports, meeting); memory as counters. Times are microseconds since the launch;
each host's clock is taken as it is. The format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.cluster.placement import host_name
from harness.runtime import MIB
from harness.runtime.files import replace_file
from harness.tools.export.subject import OUTER_PHASES

TRACE = "trace.json"
PHASES, ENGINE, START = 0, 1, 2
"""The threads of a rank."""
COUNTERS = {"host memory": ("rss",), "GPU memory": ("used", "reserved", "engine"), "GPU memory, most": ("peak",)}
"""Each counter and its series: figures of harness/runtime/memory_gauge.py, in MiB."""

Event = Mapping[str, Any]
Outcome = Literal["ended", "failed", "open"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One phase of one rank, in seconds since the run began. An open one lasts until the run ended."""

    rank: int
    phase: str
    step: int | None
    start: float
    end: float
    outcome: Outcome


def write_trace(folder: Path, events: Sequence[Event], ended: float = 0.0) -> Path:
    """Write trace.json into the run directory, one event in each line, and return its path.

    For the arguments see spans.
    """
    file = folder / TRACE
    replace_file(file, _json_lines(trace_events(events, ended)))
    return file


def _json_lines(items: Iterator[dict[str, Any]]) -> Iterator[str]:
    """Yield the text of a JSON array that has each item in its own line."""
    separator = "[\n"
    for each in items:
        yield separator + json.dumps(each)
        separator = ",\n"
    yield "\n]\n" if separator != "[\n" else "[]\n"


def trace_events(events: Sequence[Event], ended: float = 0.0) -> Iterator[dict[str, Any]]:
    """Yield the events of the trace. events: of all ranks, by time."""
    first = began(events)
    for rank, host in {each["rank"]: host_name(each["host"]) for each in events}.items():
        for name, thread, value in (
            ("process_name", PHASES, {"name": f"rank {rank} on {host}"}),
            ("process_sort_index", PHASES, {"sort_index": rank}),
            ("thread_name", PHASES, {"name": "phases"}),
            ("thread_name", ENGINE, {"name": "engine calls"}),
            ("thread_name", START, {"name": "start"}),
        ):
            yield {"ph": "M", "name": name, "pid": rank, "tid": thread, "ts": 0, "args": value}
    for span in spans(events, ended):
        ending = {} if span.outcome == "ended" else {"outcome": span.outcome}
        more = {"step": span.step} | ending
        yield _complete("phase", span.phase, span.rank, PHASES, span.start, span.end, more)
    yield from _starts(events, first)
    for each in events:
        since = float(each["time"]) - first
        if each["event"] == "engine_call":
            took = float(each["seconds"])
            yield _complete("engine", each["call"], each["rank"], ENGINE, since - took, since, {"ok": each["ok"]})
        elif each["event"] == "phase_end":
            figures = each.get("memory") or {}
            for name, series in COUNTERS.items():
                if values := {f"{figure} MiB": figures[figure] / MIB for figure in series if figure in figures}:
                    place = {"pid": each["rank"], "tid": PHASES, "ts": _microseconds(since)}
                    yield {"ph": "C", "name": name, "cat": "memory", **place, "args": values}
        elif each["event"] == "failed":
            place = {"pid": each["rank"], "tid": PHASES, "ts": _microseconds(since)}
            yield {"ph": "i", "s": "p", "name": f"failed: {each['error']}", "cat": "failure", **place}


def _starts(events: Sequence[Event], first: float) -> Iterator[dict[str, Any]]:
    """Yield the parts of each rank's start. Parts that overlap are in different threads, as the format wants it."""
    taken: dict[int, list[float]] = {}
    for each in sorted((each for each in events if each["event"] == "span"), key=lambda each: float(each["began"])):
        ends = taken.setdefault(each["rank"], [])
        lane = next((lane for lane, end in enumerate(ends) if end <= each["began"]), len(ends))
        ends[lane:] = [each["ended"], *ends[lane + 1 :]]
        times = each["began"] - first, each["ended"] - first
        yield _complete("start", each["part"], each["rank"], START + lane, *times, {})


def _complete(
    category: str, name: str, rank: int, thread: int, start: float, end: float, more: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": _microseconds(start), "dur": _microseconds(end) - _microseconds(start)}
    return {"ph": "X", "name": name, "cat": category, "pid": rank, "tid": thread, **times, "args": more}


def _microseconds(seconds: float) -> int:
    """Round to whole microseconds; spans that nest, or follow one another, still do so."""
    return max(0, round(seconds * 1e6))


def began(events: Sequence[Event]) -> float:
    """Return the UNIX time at which the run began: at its launch, or at its first event."""
    return min((float(each["began" if each["event"] == "span" else "time"]) for each in events), default=0.0)


def spans(events: Sequence[Event], ended: float = 0.0) -> list[Span]:
    """Return the phases of all ranks, without the one that holds all others.

    events: of all ranks, by time. ended: when the run ended, in UNIX seconds, if that was after its last event.
    """
    first, last = began(events), float(events[-1]["time"]) if events else 0.0
    opened: dict[tuple[int, str, int | None], list[float]] = {}
    found: list[Span] = []

    def close(place: tuple[int, str, int | None], begin: float, end: float, outcome: Outcome) -> None:
        rank, phase, step = place
        found.append(Span(rank=rank, phase=phase, step=step, start=begin - first, end=end - first, outcome=outcome))

    for each in events:
        if not each["event"].startswith("phase_") or each["phase"] in OUTER_PHASES:
            continue
        place = (each["rank"], each["phase"], each["step"])
        if each["event"] == "phase_start":
            opened.setdefault(place, []).append(float(each["time"]))
        elif opened.get(place):
            outcome: Outcome = "failed" if each["event"] == "phase_failed" else "ended"
            close(place, opened[place].pop(), float(each["time"]), outcome)
    for place, starts in opened.items():
        for begin in starts:
            close(place, begin, max(ended, last), "open")
    return sorted(found, key=lambda each: (each.rank, each.start, -each.end))
