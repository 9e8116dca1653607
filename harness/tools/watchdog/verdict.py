"""The watchdog's verdict on a run that failed: the first failure in one sentence, what explains it, and what followed.

It is printed by the watchdog, and kept in the run directory as failure-HOST.json with stacks and GPU processes.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil

from harness.rollout.engine_processes import ENDING_SIGNALS
from harness.runtime import redact
from harness.runtime.background import in_background
from harness.runtime.files import replace_file
from harness.runtime.tracebacks import first_cause, log_lines, tracebacks_in
from harness.tools.diagnose.diagnose import OF_A_RUN, diagnose
from harness.tools.diagnose.diagnosis_text import in_brief
from harness.tools.watchdog.failures import Kind, Place, RunFailure, first_failure, format_ranks, format_time, trace_end
from harness.tools.watchdog.stacks import Stack, describe_stacks, gpu_memory, take_stacks

KINDS_WITH_A_TEXT = ("exception", "echo", "died", "deadline", "stopped")
READ_BYTES = 64 << 20  # of one engine's log, from its start: the first failure counts

Explanation = tuple[list[str], str | None]
"""Lines, and the slug of the catalogue entry, if any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """What a host knows of the whole job when it reports a failure."""

    now: float  # UNIX seconds
    world_size: int
    places: Mapping[int, Place]  # of every rank that was heard
    hosts: Mapping[int, str]  # of every rank whose host is known
    waiting: Mapping[int, bool] = field(default_factory=dict)
    """Whether a rank's main thread waits for other ranks, for those whose stack is known."""


@dataclass(slots=True)
class RunVerdict:
    """What one host knows of a run that failed; whatever may block is done on threads."""

    host: str
    folder: Path | None  # the run directory; None before the ranks have met
    failures: list[RunFailure]
    view: JobView
    stacks: list[Stack] = field(default_factory=list)
    gpus: str = ""
    explanation: "Future[Explanation]" = field(init=False)

    def __post_init__(self) -> None:
        cause, folder = self.cause, self.folder
        self.explanation = in_background(lambda: explain(cause, folder), "explanation")  # a disk may hang

    @property
    def cause(self) -> RunFailure:
        return first_failure(self.failures)

    def begin_to_collect(self, ranks: Sequence[Stack], descendants: Mapping[int, psutil.Process]) -> "Future[None]":
        """Take the stacks of ranks and of what they started, and look at the GPUs, on a thread."""

        def collect() -> None:
            wanted = list(ranks)
            for pid, process in descendants.items():
                with suppress(psutil.NoSuchProcess):
                    name = re.sub(r"\W+", "-", process.name()).strip("-")
                    wanted.append(Stack(name=f"{name}-{pid}", pid=pid))
            take_stacks(wanted)
            self.gpus, self.stacks = gpu_memory(), wanted

        return in_background(collect, "stacks")

    def text(self) -> str:
        """Return all that is known now, for the screen."""
        ending = f"  reported by the watchdog on {self.host}; terminating the remaining processes"
        return "\n".join([*self.lines(), ending]) + "\n"

    def lines(self) -> list[str]:
        """Return the verdict without its last line."""
        ranks = {int(stack.name[4:]): stack for stack in self.stacks if re.fullmatch(r"rank\d+", stack.name)}
        view = replace(self.view, waiting={rank: stack.waits for rank, stack in ranks.items() if stack.frames})
        explanation = describe_stacks(ranks)
        if self.stacks and self.folder:
            explanation.append(f"all stacks: {self.folder}/stacks-{self.host}-*.txt")
        lines = report_lines(self.failures, view, [*explanation, *self._explained()[0]])
        return [*lines, f"  run directory: {self.folder}"] if self.folder else lines

    def keep(self) -> None:
        """Write it to the run directory; block as long as the folder does."""
        if not self.folder:
            return
        kept = {"host": self.host, "code": self.cause.code, "said": self.lines(), "slug": self._explained()[1]}
        kept |= {"first": asdict(self.cause), "failures": [asdict(each) for each in self.failures]}
        files = {f"failure-{self.host}.json": json.dumps(redact.values(kept), indent=1)}
        files |= {f"stacks-{self.host}-{stack.name}.txt": redact.text(stack.text) for stack in self.stacks}
        files |= {f"gpus-{self.host}.txt": self.gpus} if self.gpus else {}
        with suppress(OSError):  # a full disk, or a folder on a lost host: the screen has it
            for name, text in files.items():
                replace_file(self.folder / name, text)

    def _explained(self) -> Explanation:
        if not self.explanation.done():
            return [], None
        error = self.explanation.exception()
        return ([f"no explanation: {error}"], None) if error else self.explanation.result()


def explain(failure: RunFailure, folder: Path | None) -> Explanation:
    """Return the scheduler's traceback if a scheduler raised it, and the catalogue's cause and fix. Raise OSError."""
    logs = sorted(folder.glob("engines/*.log")) if folder else []
    lines = []
    if "engine process" in failure.detail or "EngineFailed" in failure.detail:
        lines = _scheduler_trace(failure, logs)
    if failure.kind not in KINDS_WITH_A_TEXT:
        return lines, None
    text = os.memfd_create("failure")  # not a file: the disk may be full
    try:
        os.write(text, "\n".join([*failure.trace, failure.detail, ""]).encode())
        found = diagnose([f"/proc/self/fd/{text}", *map(str, logs)], OF_A_RUN)
    finally:
        os.close(text)
    return lines + in_brief(found), found.finding.entry.slug if found.finding else None


def _scheduler_trace(failure: RunFailure, logs: Sequence[Path]) -> list[str]:
    """Return the traceback in an engine's log of the error that the failure names, or else the log's first one.

    Nothing if the rank itself raised that error, since its traceback is printed.
    """
    if failure.trace and failure.trace[-1].removesuffix("...") in failure.detail:
        return []
    # A process that a signal ended left no traceback: the one in the log belongs to a process that lost it.
    ended = any(f") died of {name}" in failure.detail for name in ENDING_SIGNALS)
    for log in [log for log in logs if log.name in failure.detail] or logs:
        with log.open("rb") as stream:
            text = stream.read(READ_BYTES).decode(errors="replace")
        found = [each for each in tracebacks_in(log_lines(text)) if not (each.is_crash or each.is_ignored)]
        named = (each for each in found if each.exception and each.exception in failure.detail)
        if shown := next(named, first_cause(found)):
            title = f"{log.name}{', what followed' if ended else ''}:"
            return [title, *(f"| {line}" for line in trace_end("\n".join(shown.lines)))]
    return []


def report_lines(failures: Sequence[RunFailure], view: JobView, explanation: Sequence[str] = ()) -> list[str]:
    """Return the first failure, its traceback and explanation, and its consequences in a line for each kind."""
    cause = first_failure(failures)
    lines = [f"FIRST FAILURE: {sentence(cause, view)}", *(f"  | {line}" for line in cause.trace)]
    lines += [f"  {line}" for line in explanation]
    kinds: dict[tuple[str, str], list[RunFailure]] = {}
    for failure in sorted((each for each in failures if each is not cause), key=lambda each: each.time):
        kinds.setdefault((failure.kind, failure.detail if failure.kind == "died" else ""), []).append(failure)
    return lines + [f"  {_consequences(same, cause)}" for same in kinds.values()]


_CAUSES: Mapping[Kind, str] = {
    "exception": "{who} failed {place} at {time}: {detail}",
    "mistake": "{who} failed {place} at {time}: {detail}",
    "echo": "{lost_peer}; {who} lost a peer {place} at {time}: {detail}",
    "ended": "{who} {detail} {place} at {time}: terminated from outside (job scheduler, time limit or kill)",
    "told": "{who} {detail} {place} at {time}",
    "vanished": "{who} {detail} {place} at {time}; why is not known here, but torchrun's report may have its exit code",
    "died": "{who} {detail} {place} at {time}",
    "launcher": "torchrun of {who} {detail} at {time}, when {its_ranks_were} {place}",
    "watchdog": "the watchdog of {host} {detail} at {time}{when}",
    "deadline": "deadline of {seconds:g} s passed {place}: {waited_for}",
    "stopped": "{what} was stopped {place} (SIGSTOP, or a debugger): its limit of {seconds:g} s passed at {time}",
    "lost": "{host} ({ranks}) is gone: last heard {time}, {ago:.1f} s ago, when {where}",
}
_CONSEQUENCES: Mapping[Kind, str] = {
    "exception": "{who} failed too {place}: {detail}",
    "mistake": "{who} failed too {place}: {detail}",
    "echo": "{who} failed too {place}: {detail}",
    "launcher": "torchrun of {who} {detail}",
    "watchdog": "the watchdog of {hosts} {detail}",
    "deadline": "{who} passed a deadline too",
    "stopped": "{who} or its engine was stopped {place}",
    "lost": "{hosts} ({ranks}) is gone too",
}


def sentence(failure: RunFailure, view: JobView) -> str:
    """Return what happened, to which rank or host, where and when."""
    ranks = format_ranks(failure.ranks)
    who, where = f"{ranks} on {failure.host}", _where(failure.ranks, view)
    return _CAUSES[failure.kind].format(
        who=who,
        what=f"{failure.detail} of {who}" if failure.detail else who,
        host=failure.host,
        ranks=ranks,
        place=failure.place,
        time=format_time(failure.time),
        ago=view.now - failure.time,
        seconds=failure.seconds,
        detail=failure.detail,
        where=where,
        its_ranks_were=f"its {'ranks' if len(failure.ranks) > 1 else 'rank'} {_were(failure.ranks)}",
        when=f", when {where}" if failure.ranks else "",
        lost_peer=_lost_peer(failure, view),
        waited_for=_waited_for(failure, view),
    )


def _consequences(same: Sequence[RunFailure], cause: RunFailure) -> str:
    """Return consequences of one kind in a line, with the seconds since the cause."""
    first = same[0]
    earliest, latest = (f"{round(each.time - cause.time, 1) + 0.0:+.1f}" for each in (first, same[-1]))  # never -0.0
    ranks = format_ranks(sorted({rank for failure in same for rank in failure.ranks}))
    hosts = ", ".join(dict.fromkeys(each.host for each in same))
    text = _CONSEQUENCES.get(first.kind, "{who} {detail} {place}").format(
        who=f"{ranks} on {hosts}", hosts=hosts, ranks=ranks, place=first.place, detail=first.detail
    )
    if len(same) == 1:
        return f"{earliest} s: {text}"
    return f"{earliest} to {latest} s: {text.replace(' was ', ' were ')}"


def _lost_peer(failure: RunFailure, view: JobView) -> str:
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
        return f"its {'ranks' if len(ranks) > 1 else 'rank'} {_were(ranks)} {next(iter(groups))}"
    return " and ".join(f"{format_ranks(group)} {_were(group)} {at}" for at, group in groups.items())


def _waited_for(failure: RunFailure, view: JobView) -> str:
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
    place = replace(view.places[behind[0]], progress=failure.place.progress)
    there = "still there" if place == failure.place else f"{place}, and had not arrived"
    return f"{_on_hosts(behind, view)} {_were(behind)} {there} {by}"


def _behind(places: Mapping[int, Place]) -> list[int]:
    least = min((place.progress for place in places.values()), default=0)
    return sorted(rank for rank, place in places.items() if place.progress == least)


def _on_hosts(ranks: Sequence[int], view: JobView) -> str:
    hosts = dict.fromkeys(view.hosts.get(rank, "an unknown host") for rank in ranks)
    return f"{format_ranks(ranks)} on {', '.join(hosts)}"


def _were(ranks: Sequence[int]) -> str:
    return "were" if len(ranks) > 1 else "was"
