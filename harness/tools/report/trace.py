"""trace.json: what every rank did when, for https://ui.perfetto.dev or chrome://tracing, of the events of a run directory.

Chrome's trace event format, as a JSON array: one process a rank; a thread for the phases, and one for the engine's calls
inside them; memory as counters. All ranks are on one clock, in microseconds since the run's first event: that of
report.html's timeline, which takes each host's clock as it is. The format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.cluster.placement import host_name
from harness.runtime import redact
from harness.runtime.units import MIB
from harness.tools.report.run_history import Event, spans

TRACE = "trace.json"
PHASES, ENGINE = 0, 1
"""Threads of a rank."""
COUNTERS = {"host memory": ("rss",), "GPU memory": ("used", "reserved", "engine"), "GPU memory, most": ("peak",)}
"""Counter -> its series: figures of harness/runtime/memory_gauge.py, in MiB."""


def write_trace(folder: Path, events: Sequence[Event], ended: float = 0.0) -> Path:
    """Write trace.json into the run directory, one event a line; return its path. events, ended: as spans takes them."""
    file, part = folder / TRACE, folder / f".{TRACE}.part"
    with part.open("w", encoding="utf-8") as output:
        separator = "[\n"
        for each in trace_events(events, ended):
            output.write(separator + json.dumps(each))
            separator = ",\n"
        output.write("\n]\n" if separator != "[\n" else "[]\n")
    part.replace(file)
    return file


def trace_events(events: Sequence[Event], ended: float = 0.0) -> Iterator[dict[str, Any]]:
    """Yield the events of the trace. events: of all ranks, by time."""
    first = float(events[0]["time"]) if events else 0.0
    for rank, host in {each["rank"]: host_name(each["host"]) for each in events}.items():
        for name, thread, value in (
            ("process_name", PHASES, {"name": f"rank {rank} on {host}"}),
            ("process_sort_index", PHASES, {"sort_index": rank}),
            ("thread_name", PHASES, {"name": "phases"}),
            ("thread_name", ENGINE, {"name": "engine calls"}),
        ):
            yield {"ph": "M", "name": name, "pid": rank, "tid": thread, "ts": 0, "args": value}
    for span in spans(events, ended):
        ending = {} if span.outcome == "ended" else {"outcome": span.outcome}
        more = {"step": span.step} | ending
        yield _complete("phase", span.phase, span.rank, PHASES, span.start, span.end, more)
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
            yield {"ph": "i", "s": "p", "name": redact.text(f"failed: {each['error']}"), "cat": "failure", **place}


def _complete(
    category: str, name: str, rank: int, thread: int, start: float, end: float, more: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": _microseconds(start), "dur": _microseconds(end) - _microseconds(start)}
    return {"ph": "X", "name": name, "cat": category, "pid": rank, "tid": thread, **times, "args": more}


def _microseconds(seconds: float) -> int:
    """Whole ones: what nests or follows still does when it is rounded."""
    return max(0, round(seconds * 1e6))
