"""What a rank does, and how it says so: phases and facts, and lines for a person.

Each fact is a line of events/rankN.jsonl; rank 0 also prints some of it. A phase has a name, a start, an end, seconds and
memory. Whatever lasts long (`working`) says every few seconds what it waits for, so that nobody takes it for one that
hangs. Standard library only.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from harness.runtime import redact

_AT_ZERO = time.time() - time.monotonic()
"""UNIX seconds at the zero of time.monotonic(), as this process has seen it first."""

MEET = "meet"
"""Until the ranks have met and have compared config, environment and locations."""
RUN = "run"
"""The whole job; all other phases are inside it."""

_START = (
    "inputs", "quantize_model", "import_sglang", "start_engine", "first_release", "build_trainer", "load_baseline",
    "load_checkpoint",
)  # fmt: skip
_STEP = (
    "resume_weights", "sync", "resume_kv_cache", "generate", "validate", "release", "old_log_probs", "reference_log_probs", "values",
    "advantages", "update_critic", "update_actor", "free_caches",
)  # fmt: skip
_VERIFY = (
    "baseline", "perturb", "push", "generate", "changed_log_probs", "poison", "fingerprints", "first_sync", "copies", "held",
    "log_probs",
)  # fmt: skip
_SYNC_JOB = ("readback", "bench")
_MISMATCH_JOB = ("engine_scores", "trainer_scores", "routers", "record", "save_weights")

STEP_PHASES = (*_STEP, *(f"verify_{part}" for part in _VERIFY))
"""Phases that belong to a step."""

PHASES = (
    *(MEET, RUN, *_START, *_STEP, *(f"verify_{part}" for part in _VERIFY)),
    *("save_checkpoint", *_SYNC_JOB, *_MISMATCH_JOB, "shutdown"),
)

EVERY_SECONDS = 8.0
"""How long a program may say nothing."""
LOOK_SECONDS = 1.0


def unix_seconds() -> float:
    """Return UNIX time that advances evenly: setting the machine's clock during a run moves no event of it."""
    return _AT_ZERO + time.monotonic()


def phase_of_step(phase: str, step: int | None) -> str:
    """Return "sync of step 1"; the name alone for a phase that belongs to no step."""
    return phase if step is None else f"{phase} of step {step}"


class Voice(Protocol):
    """Where the lines go."""

    spoke: float
    """time.monotonic() when it last said something."""

    def say(self, text: str) -> None: ...


@dataclass(slots=True)
class StandardError:
    """Lines on standard error as it is now: while an engine starts, descriptor 2 is the engine's log."""

    spoke: float = field(default_factory=time.monotonic)
    _screen: int = field(default_factory=lambda: os.dup(2))

    def say(self, text: str) -> None:
        self.spoke = time.monotonic()
        with suppress(OSError):  # nobody reads it
            os.write(self._screen, f"{text}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        os.close(self._screen)


@dataclass(slots=True)
class Work:
    """What a program is doing."""

    what: str
    """May change while it lasts, as in "3 of 16 ranks done"."""
    importing: bool = False
    every: float = 0.0
    """Seconds between two lines; 0: EVERY_SECONDS."""
    began: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class _Open:
    """The working() blocks that a thread is inside of, outermost first, and where all of them speak."""

    voice: Voice
    works: list[Work] = field(default_factory=list)


_open: ContextVar[_Open | None] = ContextVar("open works", default=None)


@contextmanager
def working(what: str, voice: Voice | None = None, *, importing: bool = False, every: float = 0.0) -> Iterator[Work]:
    """Say what is done in this block whenever nothing was said for EVERY_SECONDS.

    Inside another such block its voice is used, and the innermost block is named. importing: whether the block does
    little but import modules (see interrupts.py). every: seconds, if not EVERY_SECONDS.
    """
    work, outer = Work(what, importing, every), _open.get()
    if outer:
        outer.works.append(work)
        try:
            yield work
        finally:
            outer.works.remove(work)
    elif voice is None:
        voice = StandardError()
        try:
            with working(what, voice, importing=importing, every=every) as work:
                yield work
        finally:
            voice.close()
    else:
        found, over = _Open(voice, [work]), threading.Event()
        speaker = threading.Thread(target=_speak, args=[found, over], name="working", daemon=True)
        speaker.start()
        token = _open.set(found)
        try:
            yield work
        finally:
            _open.reset(token)
            over.set()
            speaker.join()


def current_work() -> Work | None:
    """Return the innermost open work of this thread."""
    found = _open.get()
    return found.works[-1] if found else None


def _speak(found: _Open, over: threading.Event) -> None:
    while not over.wait(min(LOOK_SECONDS, EVERY_SECONDS)):
        now, work = time.monotonic(), found.works[-1]
        if now - max(found.voice.spoke, found.works[0].began) >= (work.every or EVERY_SECONDS):
            with suppress(OSError):  # a closed pipe, which whoever speaks next notices
                found.voice.say(f"{work.what} ({now - work.began:.0f} s so far)")


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
        self._write(f"[{unix_seconds() - self.launched:6.1f} s] {text}\n")

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
            {"time": unix_seconds(), "rank": self.rank, "host": self.host, "event": name} | redact.values(values),
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
