"""What a bisect prints while it runs: a live table on a terminal, plain lines elsewhere."""

import sys
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from harness.runtime import redact
from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.search import find_edges, steps_left, untested
from harness.tools.bisection.state import Record, State

ROWS = 24
LINE_SECONDS = 60.0
"""Between two signs of life without a live table."""
STYLES = {"good": "green", "bad": "red", "skip": "yellow", "other": "magenta", "closed": "dim", "": ""}


@dataclass
class Progress:
    """Standard output."""

    state: State | None = None
    started: float = field(default_factory=time.monotonic)
    _live: Any = None
    _phase: str = ""
    _phase_since: float = 0.0
    _last_line: float = 0.0
    """When a line last named the phase."""

    def __post_init__(self) -> None:
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(auto_refresh=False, transient=True)
            self._live.start()

    def say(self, text: str) -> None:
        """Print one line that stays, without secrets."""
        line = f"[{time.monotonic() - self.started:7.1f} s] {redact.text(text)}"
        if self._live:
            self._live.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def start(self, text: str) -> None:
        """Print a line for a run that begins, if there is no live table."""
        if not self._live:
            self.say(text)

    def phase(self, text: str) -> None:
        """Show what is being done now."""
        if text != self._phase:
            self._phase, self._phase_since = text, time.monotonic()
            self._last_line = self._phase_since
        self.beat()

    def beat(self) -> None:
        """Show that time has passed."""
        now = time.monotonic()
        if self._live:
            self._live.update(self._table(), refresh=True)
        elif self._phase and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            self.say(f"{self._phase} ({now - self._phase_since:.0f} s)")

    def verdict(self, record: Record, candidate: Candidate, steps: int | None) -> None:
        """Print a line for a candidate that has a verdict."""
        waited = f", waited {record.waited_seconds:.1f} s for its environment" if record.waited_seconds >= 1 else ""
        more = f"; at most {steps} more {'step' if steps == 1 else 'steps'}" if steps is not None else ""
        log = f", {record.decisive.log}" if record.decisive and record.verdict != "good" else ""
        self.say(
            f"{record.verdict.upper():<5} {candidate.label}: {record.reason.rstrip('.')}"
            f" ({record.seconds:.1f} s{waited}{log}){more}"
        )

    def close(self) -> None:
        """Remove the table; the lines stay."""
        if self._live:
            self._live.stop()
            self._live = None

    def _table(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        status = Text(f"{self._phase} ({time.monotonic() - self._phase_since:.0f} s)", style="bold")
        if self.state is None:
            return status
        table = Table(box=None, pad_edge=False)
        for heading in ("candidate", "verdict", "seconds", "why"):
            table.add_column(heading, no_wrap=True)
        for *cells, kind in candidate_rows(self.state)[:ROWS]:
            table.add_row(*cells, style=STYLES[kind])
        return Group(table, Text(describe_left(self.state)), status)


def candidate_rows(state: State) -> list[tuple[str, str, str, str, str]]:
    """Return four cells and the kind of each candidate of which something is known, and how many lie between them."""
    verdicts = state.verdicts
    found: list[tuple[str, str, str, str, str]] = []
    unknown = 0
    for index, candidate in enumerate([*state.candidates, None]):
        if candidate and index not in verdicts and candidate.name not in state.closed:
            unknown += 1
            continue
        if unknown:
            found.append((f"  {unknown} more", "", "", "", ""))
            unknown = 0
        if candidate and index in verdicts:
            record = state.record(index)
            cells = (candidate.label[:40], record.verdict, f"{record.seconds:.1f}", record.reason[:100])
            found.append((*cells, record.verdict))
        elif candidate:
            found.append((candidate.label[:40], "skip", "", state.closed[candidate.name][:100], "closed"))
    return found


def describe_left(state: State) -> str:
    """Return candidates, steps and time left."""
    verdicts, closed = state.verdicts, state.closed_indices
    edges = find_edges(verdicts)
    if not edges:
        return f"{len(state.candidates) - len(closed)} candidates; the ends are verified first"
    left = [len(untested(edge, verdicts, closed)) for edge in edges]
    steps = sum(map(steps_left, left))
    ran = [record.seconds + record.waited_seconds for record in state.records if record.attempts]
    minutes = f", about {steps * median(ran) / 60:.1f} min" if ran else ""
    return f"{sum(left)} candidates left, at most {steps} {'step' if steps == 1 else 'steps'}{minutes}"
