"""The first failure of a job in one sentence, what explains it, and what followed from it in a line for each kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.tools.watchdog.failure import Failure, Place, clock, first, named_ranks, said_ranks


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
    waiting: Mapping[int, bool] = field(default_factory=dict)
    """Whether a rank's main thread waits for other ranks, of those whose stack is known."""


def tell(failures: Sequence[Failure], view: View, explanation: Sequence[str] = ()) -> list[str]:
    """The first failure in a line, its exception, what explains it, and what came after it in a line for each kind."""
    cause = first(failures)
    rest = sorted((each for each in failures if each is not cause), key=lambda each: each.time)
    lines = [f"FIRST FAILURE: {sentence(cause, view)}", *(f"  | {line}" for line in cause.trace)]
    if cause.kind == "echo":
        lines.append(
            "  no rank or host is known to have failed before it: a peer vanished, or the network between them did"
        )
    lines += [f"  {line}" for line in explanation]
    kinds: dict[tuple[object, ...], list[Failure]] = {}
    for failure in rest:
        kinds.setdefault((failure.kind, failure.detail if failure.kind == "died" else ""), []).append(failure)
    return lines + [f"  {_folded(same, cause, view)}" for same in kinds.values()]


def sentence(failure: Failure, view: View) -> str:
    """What happened, to whom, where and when; and that it was asked for."""
    asked = f", as asked: --inject {failure.asked}" if failure.asked and failure.asked not in failure.detail else ""
    return _happened(failure, view) + asked


def _happened(failure: Failure, view: View) -> str:
    who = f"{said_ranks(failure.ranks)} on {failure.host}"
    at = f"at {clock(failure.time)}"
    if failure.kind == "lost":
        silent = f"last heard {clock(failure.time)}, {view.now - failure.time:.1f} s ago"
        return f"{failure.host} ({said_ranks(failure.ranks)}) is gone: {silent}, when {_where(failure.ranks, view)}"
    if failure.kind == "deadline":
        return f"deadline of {failure.seconds:g} s passed {failure.place}: {_waited_for(failure, view)}"
    if failure.kind == "stopped":
        who = f"{failure.detail} of {who}" if failure.detail else who
        return f"{who} was stopped {failure.place} (SIGSTOP, or a debugger): its deadline of {failure.seconds:g} s passed {at}"
    if failure.kind == "watchdog":
        where = f", when {_where(failure.ranks, view)}" if failure.ranks else ""
        return f"the watchdog of {failure.host} {failure.detail} {at}{where}"
    if failure.kind in ("launcher", "told"):
        return f"torchrun of {who} {failure.detail} {at}, when {_where(failure.ranks, view)}"
    if failure.kind == "ended":
        return f"{who} {failure.detail} {failure.place} {at}: told to end, as by a job scheduler, a time limit, kill or Ctrl-C"
    if failure.kind == "vanished":
        return f"{who} died {failure.place} {at}: how is not known here; torchrun's report may have its exit code"
    if failure.kind == "died":
        return f"{who} {failure.detail} {failure.place} {at}"
    if failure.kind == "echo":
        return f"{_vanished(failure, view)}; {who} lost a peer {failure.place} {at}: {failure.detail}"
    return f"{who} failed {failure.place} {at}: {failure.detail}"


def _folded(same: Sequence[Failure], cause: Failure, view: View) -> str:
    """Consequences of one kind in a line."""
    earliest, latest = (each.time - cause.time for each in (same[0], same[-1]))
    ranks = sorted({rank for failure in same for rank in failure.ranks})
    if len(same) == 1:
        return f"{_after(earliest)} s: {_alone(same[0], view)}"
    hosts = ", ".join(dict.fromkeys(each.host for each in same))
    who, when = f"{said_ranks(ranks)} on {hosts}", f"{_after(earliest)} to {_after(latest)} s"
    if same[0].kind == "echo":
        return f"{when}: {_lost(ranks, same[0])}"
    if same[0].kind == "deadline":
        return f"{when}: {who} passed a deadline too"
    if same[0].kind == "lost":
        return f"{when}: {hosts} ({said_ranks(ranks)}) are gone too"
    if same[0].kind == "vanished":
        return f"{when}: {who} died too"
    if same[0].kind in ("died", "ended"):
        return f"{when}: {who} {same[0].detail.replace('was ', 'were ')}"
    return f"{when}: {who} failed too: {same[0].detail}"


def _alone(failure: Failure, view: View) -> str:
    who = f"{said_ranks(failure.ranks)} on {failure.host}"
    if failure.kind == "echo":
        return _lost(failure.ranks, failure)
    if failure.kind == "ended":
        return f"{who} {failure.detail} {failure.place}"
    return f"{who} passed its deadline {failure.place} too" if failure.kind == "deadline" else sentence(failure, view)


def _after(seconds: float) -> str:
    """+0.5; never -0.0."""
    return f"{round(seconds, 1) + 0.0:+.1f}"


def _lost(ranks: Sequence[int], failure: Failure) -> str:
    if named_ranks(failure.detail):
        return f"{said_ranks(ranks)} on {failure.host} failed with it {failure.place}"
    return f"{said_ranks(ranks)} on {failure.host} lost a peer {failure.place}: {failure.detail}"


def _vanished(failure: Failure, view: View) -> str:
    """Whom a rank may have lost: those that are behind all others, without itself."""
    places = {rank: place for rank, place in view.places.items() if rank not in failure.ranks}
    silent = sorted(set(range(view.world_size)) - set(view.places))
    if silent:
        return f"a peer vanished: nothing was heard of {said_ranks(silent)}"
    least = min((place.progress for place in places.values()), default=0)
    behind = [rank for rank, place in places.items() if place.progress == least]
    if not behind:
        return "a peer vanished"
    return f"a peer vanished: {said_ranks(behind)} last reported {places[behind[0]]}"


def _where(ranks: Sequence[int], view: View) -> str:
    """Its ranks were in sync of step 1; or each on its own."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        groups.setdefault(str(view.places.get(rank, Place())), []).append(rank)
    if len(groups) == 1:
        return f"its {_ranks_were(ranks)} {next(iter(groups))}"
    return " and ".join(f"{said_ranks(group)} {_were(group)} {at}" for at, group in groups.items())


def _waited_for(failure: Failure, view: View) -> str:
    """Which ranks are behind all others, or where none is, do something else than wait: for those the others wait."""
    unknown = sorted(set(range(view.world_size)) - set(view.places))
    if unknown:
        return f"nothing was heard of {said_ranks(unknown)} (waited for by {said_ranks(list(view.places))})"
    least = min(place.progress for place in view.places.values())
    behind = sorted(rank for rank, place in view.places.items() if place.progress == least)
    ahead = sorted(set(view.places) - set(behind))
    if not ahead:
        busy = sorted(rank for rank in behind if view.waiting.get(rank) is False)
        waiting = sorted(rank for rank in behind if view.waiting.get(rank))
        if busy and waiting:
            by = f"(waited for by {said_ranks(waiting)})"
            return f"{_on_hosts(busy, view)} {_were(busy)} in it and waited for no other rank {by}"
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
