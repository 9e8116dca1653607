"""What can go wrong with a rank or a host, which of several failures came first, and how each is told."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated

import msgspec

from harness.runtime.failure import Failure, Kind

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
# Reasons that gloo, NCCL, torch's store and HTTP clients give in the same errors as a lost peer, but which lie here.
_OWN_REASON = re.compile(
    r"out of memory|ncclInvalidUsage|ncclInvalidArgument|Duplicate GPU|EADDRINUSE|address already in use|"
    r"too many open files|HTTPS?ConnectionPool",
    re.IGNORECASE,
)
_RAISED_FROM = "The above exception was the direct cause of the following exception:"
ERROR_LENGTH = 300  # characters of an error in a heartbeat, which must fit in few packets, and on the screen
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
        return Failure(phase=self.phase, step=self.step, inside=self.inside).where


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """The ranks of one torchrun on one host, and the address of their watchdog."""

    host: str
    ranks: tuple[int, ...]
    address: str = ""
    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0

    def __str__(self) -> str:
        return f"{self.host} ({format_ranks(self.ranks)})"


def trace_end(trace: str) -> tuple[str, ...]:
    """Return the last lines of a traceback without the lines of markers. Of chained exceptions, take the first one."""
    while _RAISED_FROM in trace:
        trace = trace[: trace.rindex(_RAISED_FROM)].rstrip()
    lines = [line for line in trace.splitlines() if line.strip(" ~^|")]
    return tuple(line if len(line) <= TRACE_WIDTH else line[: TRACE_WIDTH - 3] + "..." for line in lines[-TRACE_LINES:])


def names_no_cause(failure: Failure) -> bool:
    """Return whether it may be the consequence of something that is not known yet."""
    return failure.kind in ("echo", "ended", "vanished")


def first_failure(failures: Iterable[Failure]) -> Failure:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """What a host knows of the whole job when it reports a failure."""

    now: float  # UNIX seconds
    world_size: int
    places: Mapping[int, Place]  # of every rank that was heard
    hosts: Mapping[int, str]  # of every rank whose host is known
    waiting: Mapping[int, bool] = field(default_factory=dict)
    """Whether a rank's main thread waits for other ranks, for those whose stack is known."""


def report_lines(failures: Sequence[Failure], view: JobView, explanation: Sequence[str] = ()) -> list[str]:
    """Return the first failure, its traceback and explanation, and its consequences in a line for each kind."""
    cause = first_failure(failures)
    lines = [f"FIRST FAILURE: {sentence(cause, view)}", *(f"  | {line}" for line in cause.traceback)]
    lines += [f"  {line}" for line in explanation]
    kinds: dict[tuple[str, str], list[Failure]] = {}
    for failure in sorted((each for each in failures if each is not cause), key=lambda each: each.time):
        kinds.setdefault((failure.kind, failure.error if failure.kind == "died" else ""), []).append(failure)
    return lines + [f"  {_consequences(same, cause)}" for same in kinds.values()]


def sentence(failure: Failure, view: JobView) -> str:
    """Return what happened, to which rank or host, where and when."""
    ranks, place, detail, time = format_ranks(failure.ranks), failure.where, failure.error, format_time(failure.time)
    who = f"{ranks} on {failure.host}"
    match failure.kind:
        case "exception" | "mistake":
            return f"{who} failed {place} at {time}: {detail}"
        case "echo":
            return f"{_lost_peer(failure, view)}; {who} lost a peer {place} at {time}: {detail}"
        case "ended":
            return f"{who} {detail} {place} at {time}: terminated from outside (job scheduler, time limit or kill)"
        case "vanished":
            unknown = "why is not known here, but torchrun's report may have its exit code"
            return f"{who} {detail} {place} at {time}; {unknown}"
        case "told" | "died":
            return f"{who} {detail} {place} at {time}"
        case "launcher":
            return f"torchrun of {who} {detail} at {time}, when {_its_ranks_were(failure.ranks)} {place}"
        case "deadline":
            return f"deadline of {failure.seconds:g} s passed {place}: {_waited_for(failure, view)}"
        case "stopped":
            what = f"{detail} of {who}" if detail else who
            limit = f"its limit of {failure.seconds:g} s passed at {time}"
            return f"{what} was stopped {place} (SIGSTOP, or a debugger): {limit}"
        case "lost":
            ago = f"{view.now - failure.time:.1f} s ago"
            return f"{failure.host} ({ranks}) is gone: last heard {time}, {ago}, when {_where(failure.ranks, view)}"
        case "":
            return "nothing has failed"


def _consequences(same: Sequence[Failure], cause: Failure) -> str:
    """Return consequences of one kind in a line, with the seconds since the cause."""
    first = same[0]
    earliest, latest = (f"{round(each.time - cause.time, 1) + 0.0:+.1f}" for each in (first, same[-1]))  # never -0.0
    hosts = ", ".join(dict.fromkeys(each.host for each in same))
    ranks = format_ranks(sorted({rank for failure in same for rank in failure.ranks}))
    who = f"{ranks} on {hosts}"
    match first.kind:
        case "exception" | "mistake" | "echo":
            text = f"{who} failed too {first.where}: {first.error}"
        case "launcher":
            text = f"torchrun of {who} {first.error}"
        case "deadline":
            text = f"{who} passed a deadline too"
        case "stopped":
            text = f"{who} or its engine was stopped {first.where}"
        case "lost":
            text = f"{hosts} ({ranks}) is gone too"
        case _:
            text = f"{who} {first.error} {first.where}"
    if len(same) == 1:
        return f"{earliest} s: {text}"
    return f"{earliest} to {latest} s: {text.replace(' was ', ' were ')}"


def _lost_peer(failure: Failure, view: JobView) -> str:
    """Return which peers a rank may have lost: those that are behind all others, itself excluded."""
    places = {rank: place for rank, place in view.places.items() if rank not in failure.ranks}
    if silent := sorted(set(range(view.world_size)) - set(view.places)):
        return f"a peer vanished: no report from {format_ranks(silent)}"
    behind = _behind(places)
    return "a peer vanished" + (f": {format_ranks(behind)} last reported {places[behind[0]]}" if behind else "")


def _where(ranks: Sequence[int], view: JobView) -> str:
    """Return "its ranks were in sync of step 1", or the place of each group of ranks."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        groups.setdefault(str(view.places.get(rank, Place())), []).append(rank)
    if len(groups) == 1:
        return f"{_its_ranks_were(ranks)} {next(iter(groups))}"
    return " and ".join(f"{format_ranks(group)} {_were(group)} {at}" for at, group in groups.items())


def _waited_for(failure: Failure, view: JobView) -> str:
    """Return for which ranks the others wait: those behind all others, or else those that are not in a collective."""
    if unknown := sorted(set(range(view.world_size)) - set(view.places)):
        return f"no report from {format_ranks(unknown)} (waited for by {format_ranks(list(view.places))})"
    behind = _behind(view.places)
    ahead = sorted(set(view.places) - set(behind))
    if not ahead:
        busy = [rank for rank in behind if view.waiting.get(rank) is False]
        waiting = [rank for rank in behind if view.waiting.get(rank)]
        if busy and waiting:
            stuck = f"{_on_hosts(busy, view)} {'are' if len(busy) > 1 else 'is'} stuck in it (not in a collective)"
            return f"{stuck}; waited for by {format_ranks(waiting)}"
        return f"all ranks ({', '.join(map(str, behind))}) are in it, and none makes progress"
    by = f"(waited for by {format_ranks(ahead)})"
    place = str(view.places[behind[0]])
    there = "still there" if place == failure.where else f"{place}, and had not arrived"
    return f"{_on_hosts(behind, view)} {_were(behind)} {there} {by}"


def _behind(places: Mapping[int, Place]) -> list[int]:
    least = min((place.progress for place in places.values()), default=0)
    return sorted(rank for rank, place in places.items() if place.progress == least)


def _on_hosts(ranks: Sequence[int], view: JobView) -> str:
    hosts = dict.fromkeys(view.hosts.get(rank, "an unknown host") for rank in ranks)
    return f"{format_ranks(ranks)} on {', '.join(hosts)}"


def _were(ranks: Sequence[int]) -> str:
    return "were" if len(ranks) > 1 else "was"


def _its_ranks_were(ranks: Sequence[int]) -> str:
    return f"its {'ranks' if len(ranks) > 1 else 'rank'} {_were(ranks)}"
