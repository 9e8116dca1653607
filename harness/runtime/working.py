"""Say what a program is doing while it says nothing else, so that nobody takes it for one that hangs.

    with working("building the trainer's class"):
        ...

A block that is shorter than EVERY_SECONDS is quiet. The lines go to standard error, or to the console of a run.
Standard library only.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

EVERY_SECONDS = 8.0
"""How long a program may say nothing."""
LOOK_SECONDS = 1.0


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
