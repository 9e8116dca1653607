"""What one rank does, one line each in events/rankN.jsonl: phases and facts. Rank 0 also prints some of it.

A phase has a name, a start, an end, seconds and memory. During a long phase, rank 0 prints every few seconds what it is
waiting for (working.py).
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from harness.runtime import clock, redact
from harness.runtime.phases import RUN
from harness.runtime.working import working


def quoted(text: str, most: int) -> str:
    """Return a model's words as they may be printed: quoted, in one line, without control characters, cut."""
    return repr(text[:most]) + "..." * (len(text) > most)


class ConsoleGone(OSError):
    """Standard output is a closed pipe.

    Distinct from BrokenPipeError, which could be a lost connection to another rank.
    """


@dataclass(slots=True)
class Console:
    """Lines for a person, each with the seconds since launch. Only rank 0 has one."""

    stream: IO[str]
    launched: float
    """UNIX seconds at which the launcher started."""
    spoke: float = field(default_factory=time.monotonic)
    """time.monotonic() when something was printed last."""

    def say(self, text: str) -> None:
        """Print one line, at once."""
        self._write(f"[{clock.now() - self.launched:6.1f} s] {text}\n")

    def show(self, text: str) -> None:
        """Print a block, such as a table, without a time."""
        self._write(text.rstrip() + "\n")

    def _write(self, text: str) -> None:
        """Write and flush; raise ConsoleGone where the pipe is closed."""
        self.spoke = time.monotonic()
        try:
            self.stream.write(text)
            self.stream.flush()
        except BrokenPipeError as error:
            raise ConsoleGone(
                "standard output is a closed pipe: the program that read this run's output has ended."
            ) from error


class Gauge(Protocol):
    """Measures memory by phase.

    Call `begin` at the start of one, then `end`, which returns the figures, or `give_up` if it failed. Phases nest.
    """

    def begin(self) -> None: ...
    def end(self) -> dict[str, int]: ...
    def give_up(self) -> None: ...


class Watcher(Protocol):
    """Is told of phases, before and after their work, and of the error that is about to end this rank."""

    def phase_begins(self, phase: str, step: int | None) -> None: ...
    def phase_ends(self, phase: str, step: int | None) -> None: ...
    def phase_fails(self, phase: str, step: int | None) -> None: ...
    def failed(self, error: str, traceback: str) -> None: ...


@dataclass(slots=True)
class EventLog:
    """What one rank did, in order. Safe to use from several threads of that rank."""

    path: Path
    rank: int
    host: str
    console: Console | None = None
    gauge: Gauge | None = None
    watcher: Watcher | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Durations of finished phases by name, in seconds."""
    step_phases: dict[int, dict[str, dict[str, float]]] = field(default_factory=dict)
    """Step -> phase -> seconds in total and the memory at its end, for phases that have finished."""
    step: int | None = None
    """The PPO step that this rank is in, which phases and facts are of."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _file: IO[str] | None = None

    def fact(self, name: str, **values: Any) -> None:
        """Write one line: time (UNIX seconds), rank, host, name and the values."""
        line = json.dumps(
            {"time": clock.now(), "rank": self.rank, "host": self.host, "event": name} | redact.values(values),
            default=lambda value: redact.text(str(value)),
        )
        with self._lock:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("a", encoding="utf-8")
            self._file.write(line + "\n")
            self._file.flush()

    def span(self, part: str, began: float, ended: float) -> None:
        """Write a part of the start that was over before it could be a phase. began, ended: UNIX seconds."""
        self.fact("span", part=part, began=began, ended=ended)

    def fail(self, error: str, traceback: str = "") -> None:
        """Write the error that is about to end this rank, and tell the watcher. May be called from any thread."""
        with suppress(OSError):  # the disk may be what failed
            self.fact("failed", error=error, traceback=traceback)
        if self.watcher:
            self.watcher.failed(error, traceback)

    def say(self, text: str) -> None:
        """Write a fact on every rank; on rank 0 print it too."""
        text = redact.text(text)
        self.fact("say", text=text)
        if self.console:
            self.console.say(text)

    @contextmanager
    def in_step(self, index: int) -> Iterator[None]:
        """Make what happens in this block part of a step."""
        self.step = index
        try:
            yield
        finally:
            self.step = None

    @contextmanager
    def phase(self, name: str, waiting_for: str = "") -> Iterator[None]:
        """Mark a phase of the step. The console prints every few seconds which long one lasts, and what it waits for."""
        started, step = time.monotonic(), self.step
        self.fact("phase_start", phase=name, step=step)
        if self.gauge:
            self.gauge.begin()
        if self.watcher:
            self.watcher.phase_begins(name, step)
        what = f"{name}: waiting for {waiting_for}" if waiting_for else name
        speaks = self.console and name != RUN  # which has all others in it
        try:
            with working(what, self.console) if speaks else nullcontext():
                yield
        except BaseException as error:
            with suppress(OSError):  # on a full disk the first failure must be raised
                self.fact("phase_failed", phase=name, step=step, error=f"{type(error).__name__}: {error}")
            if self.gauge:
                self.gauge.give_up()
            if self.watcher:
                self.watcher.phase_fails(name, step)
            raise
        else:
            elapsed = time.monotonic() - started
            self.seconds.setdefault(name, []).append(elapsed)
            figures = self.gauge.end() if self.gauge else {}
            if step is not None:
                phases = self.step_phases.setdefault(step, {})
                before = phases.get(name, {}).get("seconds", 0.0)
                phases[name] = {**figures, "seconds": before + elapsed}
            self.fact("phase_end", phase=name, step=step, seconds=elapsed, memory=figures)
            if self.watcher:
                self.watcher.phase_ends(name, step)

    def close(self) -> None:
        """Close the file; a later fact opens it again."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
