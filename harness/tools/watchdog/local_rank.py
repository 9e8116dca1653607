"""A rank of this host, as its watchdog knows it."""

import json
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from harness.runtime.phases import RUN
from harness.runtime.processes import is_alive
from harness.tools.watchdog.deaths import Death
from harness.tools.watchdog.failure import Kind, Place, phase_of_step
from harness.tools.watchdog.messages import Lines
from harness.tools.watchdog.processes import how_it_ended
from harness.tools.watchdog.stacks import Asked


@dataclass(slots=True)
class Open:
    """A phase that a rank is in."""

    name: str
    step: int | None
    since: float
    """time.monotonic()."""
    deadline: float | None


@dataclass(slots=True)
class LocalRank:
    """A rank's process, its line to us, and its phases."""

    line: socket.socket
    moved: float
    """time.monotonic() when it last began or ended a phase."""
    pid: int
    """As the kernel says."""
    rank: int = -1
    """-1 until it has said who it is."""
    death: Death | None = None
    process: psutil.Process | None = None
    handler: int | None = None
    """Its descriptor of the memory into which its faulthandler writes; see stacks.py."""
    left: int | None = None
    """The exit code with which it said that it leaves."""
    injected: str = ""
    """The fault of run.inject that happens to it in the phase that it is in."""
    failed: Kind | None = None
    """A failure of it is known, of this kind; what it does now is a consequence."""
    closed: bool = False
    """Its line is closed: it has died, or is about to."""
    gone: bool = False
    meets: bool = False
    """It waits for the hosts to hear each other."""
    open: list[Open] = field(default_factory=list)
    place: Place = field(default_factory=Place)
    _lines: Lines = field(default_factory=Lines)

    def hear(self) -> list[bytes]:
        """The lines that it has said since the last time; marks the line closed at its end."""
        try:
            data = self.line.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self.closed = self.closed or not data
        return self._lines.add(data)

    def begin(self, name: str, step: int | None, deadline: float | None, now: float) -> None:
        """It begins a phase."""
        self.injected = ""
        self.open.append(Open(name, step, now, deadline))
        self._move(now)

    def end(self, name: str, now: float) -> None:
        """It ended a phase, and with it whatever failed inside and was caught."""
        self.injected = ""
        names = [each.name for each in self.open]
        if name in names:
            ended = self.open[len(names) - 1 - names[::-1].index(name)]
            del self.open[len(names) - 1 - names[::-1].index(name) :]
            if name != RUN:
                self.place = Place(self.place.progress, ended.name, ended.step, False)
        self._move(now)

    def overdue(self, now: float, idle_seconds: float) -> float | None:
        """The deadline, in seconds, that it has passed; None: none."""
        if self.failed or self.gone or self.left is not None:
            return None
        for each in self.open:
            if each.deadline is not None and now - each.since > each.deadline:
                return each.deadline
        innermost = self.open[-1] if self.open else None
        between = innermost is None or innermost.name == RUN
        return idle_seconds if between and now - self.moved > idle_seconds else None

    @property
    def where(self) -> str:
        """sync of step 1."""
        return phase_of_step(self.place.phase, self.place.step)

    def came_after(self, ranks: Sequence["LocalRank"], now: float) -> float:
        """Seconds that all others have waited where it has come now; 0 while some are elsewhere."""
        others = [each for each in ranks if each is not self]
        if not others or any(each.place != self.place for each in others):
            return 0.0
        return now - max(each.moved for each in others)

    def ended(self) -> str | None:
        """How it ended, in words, "" where that is not known; None while it lives."""
        if self.death is None or not self.death.over.is_set():
            return None
        how = self.death.how or how_it_ended(self.pid)
        return how or (None if self.lives() else "")

    def asked(self) -> Asked:
        """For its stack."""
        return Asked(name=f"rank{self.rank}", pid=self.pid, handler=self.handler)

    def lives(self) -> bool:
        """Whether its process runs."""
        return not self.gone and self.process is not None and is_alive(self.process)

    def send(self, message: dict[str, Any]) -> None:
        """Tell it something, unless it has just died."""
        with suppress(OSError):
            self.line.sendall((json.dumps(message) + "\n").encode())

    def _move(self, now: float) -> None:
        inside = next((each for each in reversed(self.open) if each.name != RUN), None)
        name, step = (inside.name, inside.step) if inside else (self.place.phase, self.place.step)
        self.place = Place(self.place.progress + 1, name, step, inside is not None)
        self.moved = now
