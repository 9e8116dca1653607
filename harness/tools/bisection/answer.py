"""What a bisect's verdicts say, and how sure that is."""

from dataclasses import dataclass
from typing import Literal

from harness.tools.bisection import search
from harness.tools.bisection.cause import cause_of, same
from harness.tools.bisection.confidence import confidence
from harness.tools.bisection.search import Edge, Verdict
from harness.tools.bisection.state import Record, State

Kind = Literal["found", "probable", "set", "several", "open"]
EXIT_CODES: dict[Kind, int] = {"found": 0, "probable": 1, "set": 1, "several": 3, "open": 4}


@dataclass(frozen=True, slots=True)
class SecondCause:
    """The bad end fails otherwise than the candidate at the edge. Candidates in order from the edge towards the bad end."""

    seen: int
    """The one nearest to the edge that fails as the bad end does."""
    hidden: tuple[int, ...]
    """Those before it that fail otherwise, the one at the edge first: what fails otherwise may have the bad end's cause too."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """found: one edge, between two neighbours; probable: it is less sure than --confidence asks; set: one edge that hides among candidates that cannot be judged; several: more
    than one cause; open: more can be run."""

    kind: Kind
    edges: tuple[Edge, ...]
    """Where good turns to bad or bad to good, oldest first."""
    second: SecondCause | None = None
    """With several causes that all fail: where the bad end's own one shows."""


def answer_of(state: State) -> Answer:
    """From the verdicts alone."""
    verdicts, closed = state.verdicts, state.closed_indices
    edges = tuple(search.edges(verdicts))
    if not edges or search.next_candidate(verdicts, closed) is not None:
        return Answer(kind="open", edges=edges)
    cause = second_cause(state)
    if cause is not None and next_for_cause(state, cause) is not None:
        return Answer(kind="open", edges=edges, second=cause)
    if len(edges) > 1 or cause is not None:
        return Answer(kind="several", edges=edges, second=cause)
    if len(edges[0].answer) > 1:
        return Answer(kind="set", edges=edges)
    return Answer(kind="found" if is_sure(state) else "probable", edges=edges)


def is_sure(state: State) -> bool:
    """Whether a failure that comes and goes was looked for often enough."""
    sure = confidence(state)
    return sure is None or sure >= state.question.options.confidence


def second_cause(state: State) -> SecondCause | None:
    """Where the bad end's own failure shows first, when the candidate at the edge next to the bad end fails otherwise; None
    where all is one cause.

    Only where any failure counts, for --match and numbers say what the cause is.
    """
    bad_end, edges = state.end("bad"), search.edges(state.verdicts)
    if state.question.kind != "failure" or bad_end is None or not edges:
        return None
    at_edge, step = (edges[0].before, -1) if state.question.options.find_fix else (edges[-1].after, 1)
    ran = [index for index in range(at_edge, bad_end + step, step) if state.verdicts.get(index) == "bad"]
    own = [index for index in ran if _fails_as(state.record(index), state.record(bad_end))]
    if not own or own[0] == at_edge or not state.record(at_edge).decisive:
        return None
    return SecondCause(own[0], tuple(ran[: ran.index(own[0])]))


def next_for_cause(state: State, cause: SecondCause) -> int | None:
    """The candidate to run next to find where the bad end's own failure begins: as if the other one had ended there, then as
    if it hid it, for as many runs as the first took at most."""
    low, high = sorted((cause.hidden[0], cause.seen))
    steps = search.steps_left(high - low)
    known: dict[int, Verdict] = dict.fromkeys((i for i in state.verdicts if low < i < high), "skip")
    near = cause.hidden[-1]
    between: dict[int, Verdict] = {i: v for i, v in known.items() if min(near, cause.seen) < i < max(near, cause.seen)}
    found = search.next_candidate({**between, near: "good", cause.seen: "bad"}, state.closed_indices)
    if found is None and len(cause.hidden) <= 2 * steps:
        found = search.next_candidate({**known, cause.hidden[0]: "good", cause.seen: "bad"}, state.closed_indices)
    return found


def _fails_as(record: Record, end: Record) -> bool:
    """Whether a bad candidate fails with a failure that the bad end showed; True where one of them is not known."""
    ends = [cause_of(each) for each in end.attempts if each.verdict == "bad"]
    if record is end or not record.decisive or not ends:
        return True
    own = cause_of(record.decisive)
    return any(same(own, each) for each in ends)
