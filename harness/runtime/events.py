"""Phases and facts of one rank: a line of events.jsonl each; on rank 0 also a line on the console.

A phase has a name, a start, an end and a memory figure. While one lasts, rank 0 says every few seconds what is being
waited for, so that a silent minute is never a mystery.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

PATIENCE_SECONDS = 10.0  # how often a phase that lasts says what it waits for


class ConsoleGone(OSError):
    """Whoever read standard output has ended: no peer of the run, as a BrokenPipeError by itself might say."""


@dataclass(slots=True)
class Console:
    """Lines for a person, each with the seconds since launch. Only rank 0 has one."""

    stream: IO[str]
    launched: float
    """time.time() at which the launcher started."""

    def say(self, text: str) -> None:
        """Print one line, at once."""
        self._write(f"[{time.time() - self.launched:6.1f} s] {text}\n")

    def show(self, text: str) -> None:
        """Print a block, such as a table, without a time."""
        self._write(text.rstrip() + "\n")

    def _write(self, text: str) -> None:
        """Raises ConsoleGone."""
        try:
            self.stream.write(text)
            self.stream.flush()
        except BrokenPipeError as error:
            raise ConsoleGone("nobody reads this run's output any more: standard output is a closed pipe.") from error


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Bytes by name at the end of a phase."""

    phase: str
    step: int | None
    figures: Mapping[str, int]


PhaseObserver = Callable[[str, int | None], None]
"""Is told a phase's name and step."""


@dataclass(slots=True)
class EventLog:
    """What one rank did, in order. Safe to use from several threads of that rank."""

    path: Path
    rank: int
    host: str
    console: Console | None = None
    memory: Callable[[], dict[str, int]] = dict
    """Returns bytes by name; called at the end of each phase."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Durations of finished phases by name, in seconds."""
    step_seconds: dict[int, dict[str, float]] = field(default_factory=dict)
    """The same of each step, by step and name."""
    phase_memory: list[PhaseMemory] = field(default_factory=list)
    """What `memory` returned at the end of each finished phase of a step."""
    phase_begins: list[PhaseObserver] = field(default_factory=list)
    """Called in order at the start of each phase; the phase's work waits for them."""
    phase_ends: list[PhaseObserver] = field(default_factory=list)
    """Called in order at the end of each phase that did not fail."""
    builds: list[Callable[[str, Any], None]] = field(default_factory=list)
    """Called in order with the name of a part of the run, and the part, once it is built."""
    endings: list[Callable[[str, str], None]] = field(default_factory=list)
    """Called in order with the reason, in one line, for which this rank is about to end, and with its traceback or ""."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _file: IO[str] | None = None

    def fact(self, name: str, **values: Any) -> None:
        """Write one line: time (UNIX seconds), rank, host, name and the values."""
        line = json.dumps(
            {"time": time.time(), "rank": self.rank, "host": self.host, "event": name} | values, default=str
        )
        with self._lock:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("a", encoding="utf-8")
            self._file.write(line + "\n")
            self._file.flush()

    def fail(self, error: str, traceback: str = "") -> None:
        """This rank is about to end, because of this error: a fact, told to whoever wants to know. From any thread."""
        with suppress(OSError):  # the disk may be what failed
            self.fact("failed", error=error, traceback=traceback)
        for tell in self.endings:
            tell(error, traceback)

    def built(self, name: str, part: Any) -> None:
        """A part of the run is there: told to whoever wants to know."""
        for observe in self.builds:
            observe(name, part)

    def say(self, text: str) -> None:
        """A line on the console, on rank 0; a fact on every rank."""
        self.fact("say", text=text)
        if self.console:
            self.console.say(text)

    @contextmanager
    def phase(self, name: str, step: int | None = None, waiting_for: str = "") -> Iterator[None]:
        """Mark a phase. With `waiting_for`, the console says every few seconds what a long one waits for."""
        started = time.monotonic()
        self.fact("phase_start", phase=name, step=step)
        for observe in self.phase_begins:
            observe(name, step)
        stop = self._announce(name, waiting_for) if self.console and waiting_for else None
        try:
            yield
        except BaseException as error:
            with suppress(OSError):  # on a full disk it is the first failure that must be told
                self.fact("phase_failed", phase=name, step=step, error=f"{type(error).__name__}: {error}")
            raise
        else:
            elapsed = time.monotonic() - started
            self.seconds.setdefault(name, []).append(elapsed)
            figures = self.memory()
            if step is not None:
                of_step = self.step_seconds.setdefault(step, {})
                of_step[name] = of_step.get(name, 0.0) + elapsed
                self.phase_memory.append(PhaseMemory(name, step, figures))
            self.fact("phase_end", phase=name, step=step, seconds=elapsed, memory=figures)
            for observe in self.phase_ends:
                observe(name, step)
        finally:
            if stop:
                stop.set()

    def close(self) -> None:
        """Close the file; a later fact opens it again."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _announce(self, name: str, waiting_for: str) -> threading.Event:
        stop = threading.Event()

        def talk() -> None:
            started = time.monotonic()
            while not stop.wait(PATIENCE_SECONDS):
                assert self.console is not None
                self.console.say(f"{name}: waiting for {waiting_for} ({time.monotonic() - started:.0f} s so far)")

        threading.Thread(target=talk, name=f"announce-{name}", daemon=True).start()
        return stop
