"""What a bisect prints while it runs: plain lines, and on a terminal a last line that shows what is being done now."""

import sys
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from harness.runtime import redact
from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.search import find_edges, steps_left, untested
from harness.tools.bisection.state import Record, State

LINE_SECONDS = 60.0
"""Between two signs of life if there is no terminal."""


@dataclass
class Progress:
    """Standard output."""

    state: State | None = None
    started: float = field(default_factory=time.monotonic)
    _status: Any = None
    _phase: str = ""
    _phase_since: float = 0.0
    _last_line: float = 0.0
    """When a line last named the phase."""

    def __post_init__(self) -> None:
        if sys.stdout.isatty():
            from rich.console import Console

            self._status = Console().status("")
            self._status.start()

    def say(self, text: str) -> None:
        line = f"[{time.monotonic() - self.started:7.1f} s] {redact.text(text)}"
        if self._status:
            self._status.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def start(self, text: str) -> None:
        """Print a line for a run that begins, if there is no terminal."""
        if not self._status:
            self.say(text)

    def phase(self, text: str) -> None:
        """Show what is being done now."""
        if text != self._phase:
            self._phase, self._phase_since = text, time.monotonic()
            self._last_line = self._phase_since
        self.beat()

    def beat(self) -> None:
        now = time.monotonic()
        line = f"{self._phase} ({now - self._phase_since:.0f} s)"
        if self._status:
            from rich.text import Text

            self._status.update(Text(f"{line}; {describe_left(self.state)}" if self.state else line))
        elif self._phase and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            self.say(line)

    def verdict(self, record: Record, candidate: Candidate, steps: int | None) -> None:
        waited = f", waited {record.waited_seconds:.1f} s for its environment" if record.waited_seconds >= 1 else ""
        more = f"; at most {steps} more {'step' if steps == 1 else 'steps'}" if steps is not None else ""
        log = f", {record.decisive.log}" if record.decisive and record.verdict != "good" else ""
        self.say(
            f"{record.verdict.upper():<5} {candidate.label}: {record.reason.rstrip('.')}"
            f" ({record.seconds:.1f} s{waited}{log}){more}"
        )

    def close(self) -> None:
        if self._status:
            self._status.stop()
            self._status = None


def describe_left(state: State) -> str:
    verdicts, closed = state.verdicts, state.closed_indices
    edges = find_edges(verdicts)
    if not edges:
        return f"{len(state.candidates) - len(closed)} candidates; the ends are verified first"
    left = [len(untested(edge, verdicts, closed)) for edge in edges]
    steps = sum(map(steps_left, left))
    ran = [record.seconds + record.waited_seconds for record in state.records if record.attempts]
    minutes = f", about {steps * median(ran) / 60:.1f} min" if ran else ""
    return f"{sum(left)} candidates left, at most {steps} {'step' if steps == 1 else 'steps'}{minutes}"
