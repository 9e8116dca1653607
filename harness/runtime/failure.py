"""Failure: the one record of what went wrong with a rank or a host; watchdogs write it, reports and exports read it."""

from dataclasses import dataclass
from typing import Literal

from harness.runtime.events import phase_of_step

Kind = Literal[
    "",  # nothing has failed
    "exception",  # a rank reported an exception
    "echo",  # the same, but of a kind that may be the consequence of a failure elsewhere
    "ended",  # a rank got a signal that torchrun, a job scheduler or kill sends
    "told",  # a rank got SIGINT, which torchrun passes on and never sends by itself
    "vanished",  # a rank's process is gone, and only torchrun knows how it ended (rare; not from Linux 6.15 on)
    "died",  # a rank's process ended without a report
    "launcher",  # torchrun is gone
    "deadline",  # a phase of a rank took too long
    "stopped",  # the same, and the rank's process, or the one of its engine that the error names, is stopped
    "lost",  # a host is silent
    "mistake",  # a rank ended with the exit code of a user error, which it has printed
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One thing that went wrong."""

    kind: Kind = ""
    time: float = 0.0
    """UNIX seconds, on the clock of the host that has this object; 0 where no watchdog noticed it."""
    host: str = ""
    ranks: tuple[int, ...] = ()
    """The rank that failed; of a launcher or a lost host, all its ranks."""
    phase: str = ""
    """The innermost phase of that rank that has begun; between phases, the one that ended last; "" before the first."""
    step: int | None = None
    inside: bool = False
    """Whether that phase has not ended."""
    error: str = ""
    """Type and message in one line, how the process ended, or which process of an engine is stopped."""
    seconds: float = 0.0
    """The length of a deadline."""
    code: int | None = 1
    """Exit code of the run; None for one that did not come to an end."""
    traceback: tuple[str, ...] = ()
    slug: str = ""
    """The catalogue's entry that it is for sure, "" if unknown."""

    @property
    def where(self) -> str:
        if not self.phase:
            return "before its first phase"
        return f"{'in' if self.inside else 'after'} {phase_of_step(self.phase, self.step)}"
