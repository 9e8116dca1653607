"""What can go wrong with a rank or a host, which of several failures came first, and which errors are consequences."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec

from harness.runtime.phases import phase_of_step

Kind = Literal[
    "exception",  # a rank reported an exception
    "echo",  # the same, but of a kind that may be the consequence of a failure elsewhere
    "ended",  # a rank got a signal that torchrun, a job scheduler or kill sends
    "told",  # a rank got SIGINT, which torchrun passes on and never sends by itself
    "vanished",  # a rank's process is gone, and only torchrun knows how it ended (rare; not from Linux 6.15 on)
    "died",  # a rank's process ended without a report
    "launcher",  # torchrun is gone
    "watchdog",  # the watchdog of a host ended, or is stopped
    "deadline",  # a phase of a rank took too long
    "stopped",  # the same, and the rank's process, or the one of its engine that detail names, is stopped
    "lost",  # a host is silent
    "mistake",  # a rank ended with the exit code of a user error, which it has printed
]

# Errors of a rank that lost a peer, in the words of gloo, NCCL, torch's store, and Python's sockets and pipes. They
# cannot be the cause.
_ECHO = re.compile(
    r"connection (?:closed|reset|refused|aborted|timed out|was lost)|closed by peer|broken ?pipe|connect timeout|"
    r"socket ?(?:closed|timeout)|no route to host|network is unreachable|host is down|timed out (?:waiting|after)|"
    r"DistNetworkError|DistStoreError|DistBackendError|gloo::IoException|ncclRemoteError|ncclSystemError|"
    r"remote process exited|failed to (?:recv|send)|EOFError|ConnectionError",
    re.IGNORECASE,
)
# Errors that all ranks raise together and that blame one: VerlEngine's calls, pre-sync checks, the gradient norm.
_FAILED_ON = re.compile(
    r"^(?:EngineFailed|WeightsRefused|FloatingPointError): .*?(?:\bon |\(|: )ranks? (\d+(?:, \d+)*)"
)
# Errors that this rank has by itself, whatever they quote: the tokenizer manager talks to processes of its host only, a
# reward to services of its own, and a program that did not end in time is no peer.
_OWN = re.compile(r"^(?:EngineFailed: SGLang's \S+ failed in this process|RewardFailed|TimeoutExpired): ")
# Reasons that gloo and NCCL give in the same errors as a lost peer, but which lie here.
_OWN_REASON = re.compile(r"out of memory|ncclInvalidUsage|ncclInvalidArgument|Duplicate GPU", re.IGNORECASE)
_RAISED_FROM = "The above exception was the direct cause of the following exception:"
ERROR_LENGTH = 300  # characters of an error that are kept: a heartbeat must fit in few packets
TRACE_LINES, TRACE_WIDTH = 10, 140  # of a traceback's end, for the same reason

TOGETHER_SECONDS = 1.0  # between the first and the last of failures that happen together
_AHEAD: Mapping[Kind, float] = {
    "stopped": 2 * TOGETHER_SECONDS,
    "told": 2 * TOGETHER_SECONDS,
    "vanished": TOGETHER_SECONDS,
    "ended": TOGETHER_SECONDS / 2,
}


def is_echo(error: str, rank: int) -> bool:
    """Return whether an error of this rank, in one line, may be the consequence of a failure of another rank or
    host.
    """
    if _OWN.match(error):
        return False
    blamed = _FAILED_ON.match(error)
    if blamed is not None and str(rank) not in blamed[1].split(", "):
        return True
    return _ECHO.search(error) is not None and not _OWN_REASON.search(error)


@dataclass(frozen=True, slots=True)
class Place:
    """How far a rank has come."""

    progress: int = 0  # phases begun and ended: all ranks go through the same ones, so the least is furthest behind
    phase: str = ""  # the innermost that has begun; between phases, the one that ended last; "" before the first
    step: int | None = None
    inside: bool = False

    def __str__(self) -> str:
        if not self.phase:
            return "before its first phase"
        return f"{'in' if self.inside else 'after'} {phase_of_step(self.phase, self.step)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """The ranks of one torchrun on one host, and the address of their watchdog."""

    host: str
    ranks: tuple[int, ...]
    address: str = ""
    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0

    def __str__(self) -> str:
        return f"{self.host} ({format_ranks(self.ranks)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFailure:
    """One thing that went wrong."""

    kind: Kind
    time: float  # UNIX seconds, on the clock of the host that has this object
    host: str
    ranks: tuple[int, ...]  # the rank that failed; for a launcher or a lost host, all its ranks
    place: Place
    detail: str = ""  # the error in one line, or how the process ended
    seconds: float = 0.0  # the length of a deadline
    code: int = 1  # exit code of the run
    trace: tuple[str, ...] = ()  # last lines of the traceback, if any


def trace_end(trace: str) -> tuple[str, ...]:
    """Return the last lines of a traceback without the lines of markers. Of chained exceptions, take the first one."""
    while _RAISED_FROM in trace:
        trace = trace[: trace.rindex(_RAISED_FROM)].rstrip()
    lines = [line for line in trace.splitlines() if line.strip(" ~^|")]
    return tuple(line if len(line) <= TRACE_WIDTH else line[: TRACE_WIDTH - 3] + "..." for line in lines[-TRACE_LINES:])


def names_no_cause(failure: RunFailure) -> bool:
    """Return whether it may be the consequence of something that is not known yet."""
    return failure.kind in ("echo", "ended", "vanished")


def first_failure(failures: Iterable[RunFailure]) -> RunFailure:
    """Return the earliest failure that can be a cause; if there is none, the earliest.

    Among failures that happen together: a stopped rank comes before the ranks that wait for it. A rank that died in a
    way that only torchrun knows comes before one that torchrun then terminated, which comes before one that lost a
    peer.
    """
    return min(failures, key=lambda each: (names_no_cause(each), each.time - _AHEAD.get(each.kind, 0.0)))


def format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def format_time(seconds: float) -> str:
    """Return UNIX seconds as a time of day, in UTC on every host."""
    return f"{datetime.fromtimestamp(seconds, UTC):%H:%M:%S} UTC"
