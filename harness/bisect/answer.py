"""What a bisect's verdicts say, and how sure that is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.bisect import search
from harness.bisect.judge import Failure
from harness.bisect.search import Edge, Verdict
from harness.bisect.state import Record, State

Kind = Literal["found", "set", "several", "open"]
EXIT_CODES: dict[Kind, int] = {"found": 0, "set": 1, "several": 3, "open": 4}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """found: one edge, between two neighbours; set: one edge that hides among candidates that cannot be judged; several: more
    than one cause; open: more can be run."""

    kind: Kind
    edges: tuple[Edge, ...]
    """Where good turns to bad or bad to good, oldest first."""
    cause_edge: Edge | None = None
    """With several causes that all fail: where the bad end's own failure takes over from the one before it."""


def answer_of(state: State) -> Answer:
    """From the verdicts alone."""
    verdicts, closed = state.verdicts, state.closed_indices
    edges = tuple(search.edges(verdicts))
    if not edges or search.next_candidate(verdicts, closed) is not None:
        return Answer(kind="open", edges=edges)
    if len(edges) > 1:
        return Answer(kind="several", edges=edges)
    if (other := causes(state, edges[0])) is not None:
        return Answer(kind="several" if not open_cause(state, other) else "open", edges=edges, cause_edge=other)
    return Answer(kind="found" if len(edges[0].answer) == 1 else "set", edges=edges)


def causes(state: State, edge: Edge) -> Edge | None:
    """Where the failures on the bad side of the edge change to the bad end's own one; None where all are of one cause.

    Only where any failure counts, for --match and numbers say what the cause is.
    """
    if state.question.kind != "failure":
        return None
    derived = _by_cause(state, edge)
    found = search.edges(derived)
    if not found:
        return None
    return found[0] if state.question.options.find_fix else found[-1]


def open_cause(state: State, edge: Edge) -> int | None:
    """The candidate to run next to narrow the edge of causes."""
    known: dict[int, Verdict] = {edge.before: "good", edge.after: "bad"}
    skipped: dict[int, Verdict] = {i: "skip" for i in state.verdicts if edge.before < i < edge.after}
    return search.next_candidate({**known, **skipped}, state.closed_indices)


def _by_cause(state: State, edge: Edge) -> dict[int, Verdict]:
    """The bad candidates beyond the edge: "bad" with the bad end's failure, "good" with another one."""
    find_fix = state.question.options.find_fix
    last = len(state.candidates) - 1
    beyond = range(0, edge.before + 1) if find_fix else range(edge.after, last + 1)
    bad_end = state.end("bad")
    assert bad_end is not None
    end = failure_names(state.record(bad_end))
    derived: dict[int, Verdict] = {}
    for index, verdict in state.verdicts.items():
        if index in beyond and verdict == "bad" and (names := failure_names(state.record(index))) and end:
            derived[index] = "bad" if names & end else "good"
    return derived


def failure_names(record: Record) -> set[str]:
    """What its first failure is called; two failures of one cause share a name. Empty where it is not known."""
    decisive = record.decisive
    if decisive is None:
        return set()
    if decisive.timed_out:
        return {"hang"}
    if not decisive.failure:
        return {f"exit code {decisive.code}"}
    return Failure(decisive.slug, decisive.failure).names


def failure_rate(records: Sequence[Record]) -> float | None:
    """Of one run of a bad candidate: failed runs of all their runs. None without any."""
    attempts = [attempt for record in records if record.verdict == "bad" for attempt in record.attempts]
    bad = sum(attempt.verdict == "bad" for attempt in attempts)
    return bad / len(attempts) if attempts else None


def confidence(state: State) -> float | None:
    """Of the answer with --repeat: the probability that no good candidate next to the edge or on the way to it was a bad one
    that happened to pass each time, (1 - (1 - rate) ** runs) for each. None where nothing was repeated."""
    rate = failure_rate(state.records)
    if state.question.options.repeat == 1 or rate is None:
        return None
    good_end = state.end("good")
    sure = 1.0
    for record in state.records:
        if record.verdict == "good" and state.index(record.name) != good_end and not record.replayed:
            sure *= 1 - (1 - rate) ** len(record.attempts)
    return sure
