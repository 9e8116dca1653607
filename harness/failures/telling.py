"""The first failure of a job in one sentence, and what followed from it in a line each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.failures.failure import Failure, Place, clock, first, said_ranks

FOLDED = 4
"""Consequences that are told; the others are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What a host knows of the whole job when it tells of a failure."""

    now: float
    """UNIX seconds."""
    world_size: int
    places: Mapping[int, Place]
    """Of every rank that was heard of."""
    hosts: Mapping[int, str]
    """Of every rank whose host is known."""


def tell(failures: Sequence[Failure], view: View) -> list[str]:
    """The first failure in a line, and what came after it in some more."""
    cause = first(failures)
    rest = sorted((each for each in failures if each is not cause), key=lambda each: each.time)
    lines = [f"FIRST FAILURE: {sentence(cause, view)}"]
    if cause.kind == "echo":
        lines.append(
            "  no rank or host is known to have failed before it: a peer vanished, or the network between them did"
        )
    for failure in rest[:FOLDED]:
        lines.append(f"  {failure.time - cause.time:+.1f} s: {sentence(failure, view)}")
    if len(rest) > FOLDED:
        lines.append(f"  and {len(rest) - FOLDED} more")
    return lines


def sentence(failure: Failure, view: View) -> str:
    """What happened, to whom, where and when."""
    who = f"{said_ranks(failure.ranks)} on {failure.host}"
    at = f"at {clock(failure.time)}"
    if failure.kind == "lost":
        silent = f"last heard {clock(failure.time)}, {view.now - failure.time:.1f} s ago"
        return f"{failure.host} ({said_ranks(failure.ranks)}) is gone: {silent}, when {_where(failure.ranks, view)}"
    if failure.kind == "deadline":
        return f"deadline of {failure.seconds:g} s passed {failure.place}: {_waited_for(failure, view)}"
    if failure.kind == "stopped":
        return f"{who} was stopped {failure.place} (SIGSTOP, or a debugger): its deadline of {failure.seconds:g} s passed {at}"
    if failure.kind == "launcher":
        return f"torchrun of {who} {failure.detail} {at}, when {_where(failure.ranks, view)}"
    if failure.kind == "ended":
        return f"{who} {failure.detail} {failure.place} {at}, as torchrun, a job scheduler or Ctrl-C does"
    if failure.kind == "died":
        return f"{who} {failure.detail} {failure.place} {at}"
    verb = "lost a peer" if failure.kind == "echo" else "failed"
    return f"{who} {verb} {failure.place} {at}: {failure.detail}"


def _where(ranks: Sequence[int], view: View) -> str:
    """Its ranks were in sync of step 1; or each on its own."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        groups.setdefault(str(view.places.get(rank, Place())), []).append(rank)
    if len(groups) == 1:
        return f"its {_ranks_were(ranks)} {next(iter(groups))}"
    return " and ".join(f"{said_ranks(group)} {_were(group)} {at}" for at, group in groups.items())


def _waited_for(failure: Failure, view: View) -> str:
    """Which ranks are behind all others: those that the others wait for."""
    unknown = sorted(set(range(view.world_size)) - set(view.places))
    if unknown:
        return f"nothing was heard of {said_ranks(unknown)} (waited for by {said_ranks(list(view.places))})"
    least = min(place.progress for place in view.places.values())
    behind = sorted(rank for rank, place in view.places.items() if place.progress == least)
    ahead = sorted(set(view.places) - set(behind))
    if not ahead:
        return f"all ranks ({', '.join(map(str, behind))}) are there, and none of them went on"
    by = f"(waited for by {said_ranks(ahead)})"
    place = view.places[behind[0]]
    if (place.phase, place.step, place.inside) == (failure.place.phase, failure.place.step, failure.place.inside):
        return f"{_on_hosts(behind, view)} {_were(behind)} still there {by}"
    return f"{_on_hosts(behind, view)} had not arrived, but {_were(behind)} {place} {by}"


def _on_hosts(ranks: Sequence[int], view: View) -> str:
    hosts = list(dict.fromkeys(view.hosts.get(rank, "an unknown host") for rank in ranks))
    return f"{said_ranks(ranks)} on {', '.join(hosts)}"


def _were(ranks: Sequence[int]) -> str:
    return "were" if len(ranks) > 1 else "was"


def _ranks_were(ranks: Sequence[int]) -> str:
    return "ranks were" if len(ranks) > 1 else "rank was"
