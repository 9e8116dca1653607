"""What can go wrong with a rank or a host, which of several is the first, and how to say it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

Kind = Literal[
    "exception",
    "echo",
    "ended",
    "vanished",
    "died",
    "launcher",
    "told",
    "watchdog",
    "deadline",
    "stopped",
    "lost",
    "mistake",
]
"""exception: a rank said so itself. echo: a rank said so, but of something that
may have happened elsewhere. ended: by a signal that torchrun, a job scheduler or Ctrl-C sends. vanished: its process is
gone, and torchrun knows of what. died: a rank's process ended without a word. launcher: torchrun did. told: torchrun got a signal, and passed it on. watchdog: that of a host ended, or is stopped. deadline: a rank's phase took too long. stopped: it did, and the rank's process is stopped, or
one of its engine, which detail names. lost: a host is silent.
mistake: a rank ended with the exit code of a mistake in what was asked, which it has said itself."""

# What a rank says that lost its peer, in the words of gloo, NCCL, torch's store, Python's sockets and pipes. None of it
# names a cause.
_ECHO = re.compile(
    r"connection (?:closed|reset|refused|aborted|timed out|was lost)|closed by peer|broken ?pipe|connect timeout|"
    r"socket ?(?:closed|timeout)|no route to host|network is unreachable|host is down|timed out (?:waiting|after)|"
    r"DistNetworkError|DistStoreError|DistBackendError|gloo::IoException|ncclRemoteError|ncclSystemError|"
    r"remote process exited|failed to (?:recv|send)|EOFError|ConnectionError",
    re.IGNORECASE,
)
# What all ranks raise together, and lay to one of them: VerlEngine's calls, the checks before a sync, the gradient's norm.
_FAILED_ON = re.compile(
    r"^(?:EngineFailed|WeightsRefused|FloatingPointError): .*?(?:\bon |\(|: )ranks? (\d+(?:, \d+)*)"
)
SHOWN = 300
"""Characters of an error that are kept: a heartbeat must fit in few packets."""
TRACE_LINES, TRACE_WIDTH = 10, 140
"""Of an exception's traceback, its last ones; for the same reason."""

_RAISED_FROM = "The above exception was the direct cause of the following exception:"
"""As Python prints it between the two."""

TOGETHER_SECONDS = 1.0
_AHEAD: Mapping[Kind, float] = {
    "stopped": 2 * TOGETHER_SECONDS,
    "told": 2 * TOGETHER_SECONDS,
    "vanished": TOGETHER_SECONDS,
    "ended": TOGETHER_SECONDS / 2,
}


def is_echo(error: str, rank: int) -> bool:
    """Whether an error of this rank, in one line, may be the consequence of another rank's, or host's, end."""
    elsewhere = named_ranks(error)
    return bool(elsewhere and rank not in elsewhere) or _ECHO.search(error) is not None


def named_ranks(error: str) -> list[int]:
    """The ranks to which an error that all raise together is laid; none where it is a rank's own."""
    match = _FAILED_ON.match(error)
    return [int(rank) for rank in match[1].split(", ")] if match else []


@dataclass(frozen=True, slots=True)
class Place:
    """How far a rank has come."""

    progress: int = 0
    """How many phases it has begun and ended: all ranks go through the same ones, so a smaller number is behind."""
    phase: str = ""
    """The innermost phase that it is in; where not inside, the one that ended last; "" before the first."""
    step: int | None = None
    inside: bool = False

    def __str__(self) -> str:
        """In words: in sync of step 1."""
        if not self.phase:
            return "before its first phase"
        return f"{'in' if self.inside else 'after'} {phase_of_step(self.phase, self.step)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """The ranks that one torchrun has on one host, and where their watchdog hears."""

    host: str
    ranks: tuple[int, ...]
    address: str = ""
    port: int = 0

    def __str__(self) -> str:
        """In words: host1 (ranks 2, 3)."""
        return f"{self.host} ({said_ranks(self.ranks)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One thing that went wrong."""

    kind: Kind
    time: float
    """UNIX seconds, on the clock of the host that holds it."""
    host: str
    ranks: tuple[int, ...]
    """The rank that failed; of a launcher or a lost host, all its ranks."""
    place: Place
    detail: str = ""
    """The error in one line, or how the process ended."""
    seconds: float = 0.0
    """Of a deadline: how long it was."""
    code: int = 1
    """What the run ends with."""
    trace: tuple[str, ...] = ()
    """The last lines of the traceback, where there is one."""
    asked: str = ""
    """The fault of run.inject that made it, where one did."""

    def as_json(self) -> dict[str, Any]:
        """For a heartbeat, or a file."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any], clock_ahead: float = 0.0) -> "Failure":
        """clock_ahead: seconds by which the sender's clock is ahead of ours."""
        changed = {
            "time": values["time"] - clock_ahead,
            "ranks": tuple(values["ranks"]),
            "place": Place(**values["place"]),
            "trace": tuple(values["trace"]),
        }
        return cls(**{**values, **changed})


def shortened(trace: str) -> tuple[str, ...]:
    """The last lines of a traceback, as they are kept; without those that only point at a part of the one above. Of an
    exception that was raised from another, those of the other, which is the cause."""
    while _RAISED_FROM in trace:
        trace = trace[: trace.rindex(_RAISED_FROM)].rstrip()
    lines = [line for line in trace.splitlines() if line.strip(" ~^|")]
    return tuple(line if len(line) <= TRACE_WIDTH else line[: TRACE_WIDTH - 3] + "..." for line in lines[-TRACE_LINES:])


def names_no_cause(failure: Failure) -> bool:
    """Whether something else, not known yet, may have led to it."""
    return failure.kind in ("echo", "ended", "vanished")


def first(failures: Iterable[Failure]) -> Failure:
    """The earliest that can be a cause; where there is none, the earliest.

    Of what happens together: a stopped rank comes before those that wait for it; one of whose end torchrun alone knows
    before one that torchrun then told to end, and that before one that lost it.
    """
    return min(failures, key=lambda each: (names_no_cause(each), each.time - _AHEAD.get(each.kind, 0.0)))


def phase_of_step(phase: str, step: int | None) -> str:
    """sync of step 1; a phase that belongs to no step by its name alone."""
    return phase if step is None else f"{phase} of step {step}"


def said_ranks(ranks: Sequence[int]) -> str:
    """rank 2; ranks 2, 3."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def clock(time: float) -> str:
    """UNIX seconds as a time of day, in UTC on every host."""
    return f"{datetime.fromtimestamp(time, UTC):%H:%M:%S} UTC"
