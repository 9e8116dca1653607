"""What a bisect shows while it goes on: a live table on a terminal, plain lines elsewhere."""

import sys
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from harness.runtime import redact
from harness.tools.bisection import search
from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.state import Record, State

ROWS = 24
SAY_SECONDS = 60.0
"""Between two signs of life where there is no live table."""
STYLES = {"good": "green", "bad": "red", "skip": "yellow", "other": "magenta", "closed": "dim"}


@dataclass
class Show:
    """Standard output."""

    started: float = field(default_factory=time.monotonic)
    _live: Any = None
    _state: State | None = None
    _phase: str = ""
    _phase_since: float = 0.0
    _said: float = 0.0
    """When a line last spoke of the phase."""

    def __post_init__(self) -> None:
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(auto_refresh=False, transient=True)
            self._live.start()

    def say(self, text: str) -> None:
        """One line that stays, without secrets."""
        line = f"[{time.monotonic() - self.started:7.1f} s] {redact.text(text)}"
        if self._live:
            self._live.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def start(self, text: str) -> None:
        """A line for a run that begins, where there is no live table."""
        if not self._live:
            self.say(text)

    def phase(self, text: str) -> None:
        """What is going on now."""
        if text != self._phase:
            self._phase, self._phase_since = text, time.monotonic()
            self._said = self._phase_since
        self.beat()

    def table(self, state: State, phase: str) -> None:
        """The candidates as they are known, with what is going on now."""
        self._state = state
        self.phase(phase)

    def beat(self) -> None:
        """Time has passed."""
        if self._live:
            self._live.update(self._drawn(), refresh=True)
        elif self._phase and time.monotonic() - self._said >= SAY_SECONDS:
            self._said = time.monotonic()
            self.say(f"{self._phase} ({self._said - self._phase_since:.0f} s)")

    def verdict(self, record: Record, candidate: Candidate, steps: int | None) -> None:
        """A line for a candidate that was judged."""
        waited = f", waited {record.waited_seconds:.1f} s for its environment" if record.waited_seconds >= 1 else ""
        more = f"; at most {steps} more {'step' if steps == 1 else 'steps'}" if steps is not None else ""
        log = record.decisive.log if record.decisive and record.verdict != "good" else ""
        self.say(
            f"{record.verdict.upper():<5} {candidate.shown}: {record.reason.rstrip('.')}"
            f" ({record.seconds:.1f} s{waited}{', ' + log if log else ''}){more}"
        )

    def close(self) -> None:
        """The table goes; what was said stays."""
        if self._live:
            self._live.stop()
            self._live = None

    def _drawn(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        status = Text(f"{self._phase} ({time.monotonic() - self._phase_since:.0f} s)", style="bold")
        if self._state is None:
            return status
        table = Table(box=None, pad_edge=False)
        for heading in ("candidate", "verdict", "seconds", "why"):
            table.add_column(heading, no_wrap=True)
        for cells, style in rows(self._state)[:ROWS]:
            table.add_row(*cells, style=style)
        return Group(table, Text(left(self._state)), status)


def rows(state: State) -> list[tuple[tuple[str, str, str, str], str]]:
    """Cells and style of each candidate that something is known of, and how many there are between them."""
    verdicts, found, silent = state.verdicts, [], 0
    for index, candidate in enumerate(state.candidates):
        if index not in verdicts and candidate.name not in state.closed:
            silent += 1
            continue
        if silent:
            found.append(((f"  {silent} more", "", "", ""), ""))
            silent = 0
        if index in verdicts:
            record = state.record(index)
            cells = (candidate.shown[:40], record.verdict, f"{record.seconds:.1f}", record.reason[:100])
            found.append((cells, STYLES[record.verdict]))
        else:
            found.append(((candidate.shown[:40], "skip", "", state.closed[candidate.name][:100]), STYLES["closed"]))
    return [*found, *([((f"  {silent} more", "", "", ""), "")] if silent else [])]


def left(state: State) -> str:
    """Candidates, steps and time left."""
    verdicts, closed = state.verdicts, state.closed_indices
    edges = search.edges(verdicts)
    if not edges:
        return f"{len(state.candidates) - len(closed)} candidates; the ends are verified first"
    untested = [len(search.unknown(edge, verdicts, closed)) for edge in edges]
    steps = sum(map(search.steps_left, untested))
    ran = [record.seconds + record.waited_seconds for record in state.records if record.attempts]
    minutes = f", about {steps * median(ran) / 60:.1f} min" if ran else ""
    return f"{sum(untested)} candidates left, at most {steps} {'step' if steps == 1 else 'steps'}{minutes}"
