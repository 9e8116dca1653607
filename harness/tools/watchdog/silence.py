"""Whether a process that should be heard, or seen to run, once a second is stopped, or hangs."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import psutil

from harness.runtime.processes import is_stopped


@dataclass(slots=True)
class Silence:
    """Counts the beats that were missed, and not seconds: a listener that was itself stopped meanwhile missed none."""

    pid: int
    stopped_beats: int
    """How many it may miss when it is stopped."""
    silent_beats: int
    """How many it may miss at all: a busy machine, or a lock in the kernel, takes its time."""
    missed: int = 0

    def heard(self) -> None:
        """A beat came."""
        self.missed = 0

    def miss(self) -> str:
        """None came for a second; returns what is wrong, in words, or ""."""
        self.missed += 1
        if self.missed >= self.stopped_beats and is_stopped(self.pid):
            return "is stopped (SIGSTOP, or a debugger)"
        return f"was silent for {self.missed} s" if self.missed >= self.silent_beats else ""


@dataclass(slots=True)
class Stopped:
    """Counts how often processes are seen stopped, without a break."""

    beats: int = 10
    """How often, before that is worth a word."""
    _seen: dict[int, int] = field(default_factory=dict)

    def look(self, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
        """Called once a second; returns those that have been stopped for that long just now."""
        stopped = [each for each in processes if is_stopped(each.pid)]
        self._seen = {each.pid: self._seen.get(each.pid, 0) + 1 for each in stopped}
        return [each for each in stopped if self._seen[each.pid] == self.beats]
