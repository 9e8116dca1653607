"""A live line on a terminal, below the lines of the console: step, phase with its seconds, reward, tokens a second.

Not rich's Live: it hides the cursor, and a rank may end, by a signal or the watchdog, before it can show it again.
"""

import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from harness.runtime.observer import Observer, RunContext
from harness.runtime.phases import RUN

REFRESH_SECONDS = 0.5
ERASE = "\r\x1b[2K"
"""To the start of the terminal's line, and clear it."""


class LinesAbove:
    """A stream whose text appears above a live line. Safe from several threads; text must end its lines."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream, self.line, self.ended = stream, "", False
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            self.stream.write(f"{ERASE}{text}{self._drawn()}")
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def show(self, line: str, last: bool = False) -> None:
        """Draw another live line; "" for none. last: none that comes later, from another thread, is drawn."""
        with self._lock:
            if not self.ended:
                self.line, self.ended = line, last
                self.stream.write(f"{ERASE}{self._drawn()}")
                self.stream.flush()

    def _drawn(self) -> str:
        """Return the line, cut where the terminal ends; other programs' output then starts where it does."""
        return f"{self.line[: shutil.get_terminal_size().columns - 1]}\r" if self.line else ""


@dataclass(slots=True)
class LiveLine(Observer):
    """Draw the live line on rank 0 where its console is a terminal; elsewhere do nothing."""

    above: LinesAbove | None = None
    steps: int = 0
    open: list[tuple[str, int | None, float]] = field(default_factory=list)
    """Phases that have begun and not ended, outermost first: name, step, time.monotonic()."""
    last: str = ""
    """Of the last step: reward and throughput."""
    _ended: threading.Event = field(default_factory=threading.Event)

    def met(self, run: RunContext) -> None:
        console = run.events.console
        if console and console.stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            self.steps = run.config.run.steps
            self.above = LinesAbove(console.stream)
            console.stream = self.above  # type: ignore[assignment]
            threading.Thread(target=self._draw, name="live-line", daemon=True).start()

    def phase_begins(self, phase: str, step: int | None) -> None:
        if phase != RUN:
            self.open.append((phase, step, time.monotonic()))

    def phase_ends(self, phase: str, step: int | None) -> None:
        self.open = [each for each in self.open if each[:2] != (phase, step)]

    def measured(self, row: Mapping[str, Any]) -> None:
        if "step" in row:
            throughput = row.get("tokens_per_second/step", 0.0)
            self.last = f"  reward {row['reward_mean']:.3f}  {throughput:,.0f} tokens/s"

    def passed(self) -> None:
        self._end()

    def failed(self, error: str, traceback: str) -> None:
        self._end()

    def interrupted(self, signal_name: str) -> None:
        self._end()

    def text(self) -> str:
        """Return the line: "" between phases."""
        opened = self.open[-1:]
        if not opened:
            return ""
        phase, step, began = opened[0]
        place = (
            ""
            if step is None
            else "final check  "
            if step >= self.steps
            else f"step {step} ({step + 1} of {self.steps})  "
        )
        return f"{place}{phase} {time.monotonic() - began:.0f} s{self.last}"

    def _draw(self) -> None:
        while self.above and not self._ended.wait(REFRESH_SECONDS):
            self.above.show(self.text())

    def _end(self) -> None:
        self._ended.set()
        if self.above:
            self.above.show("", last=True)
