"""What a bisect's verdicts answer: in kind and edges, in sentences for people, and as a dictionary for programs."""

import json
from dataclasses import dataclass
from itertools import groupby
from shlex import quote
from typing import Any, Literal

from harness.runtime import redact
from harness.tools.bisection.candidates import labels
from harness.tools.bisection.causes import differ_only_in_place, literal_parts, same_cause
from harness.tools.bisection.confidence import confidence, failure_rate, is_sure, repeat_needed
from harness.tools.bisection.installation import unmet_requirements
from harness.tools.bisection.measurement import describe_limit
from harness.tools.bisection.search import Edge, Verdict, find_edges, next_candidate, steps_left
from harness.tools.bisection.state import Attempt, Record, State

AnswerKind = Literal["found", "probable", "set", "several", "open"]
EXIT_CODES: dict[AnswerKind, int] = {"found": 0, "probable": 1, "set": 1, "several": 3, "open": 4}
MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class SecondCause:
    """The bad end fails otherwise than the candidate at the edge. Candidates in order from the edge towards the bad end."""

    seen: int
    """The one nearest to the edge that fails as the bad end does."""
    hidden: tuple[int, ...]
    """Those before it, the one at the edge first: their failure may hide the bad end's."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The edges, where good turns to bad or bad to good, oldest first, and what they amount to.

    found: one edge, between two neighbours. probable: the same, less sure than --confidence asks. set: one edge that hides
    among candidates that cannot be classified. several: more than one cause. open: more can be run.
    """

    kind: AnswerKind
    edges: tuple[Edge, ...]
    second: SecondCause | None = None
    """With several causes that all fail: where the bad end's own one shows."""


def answer_of(state: State) -> Answer:
    edges = tuple(find_edges(state.verdicts))
    if not edges or next_candidate(state.verdicts, state.closed_indices) is not None:
        return Answer(kind="open", edges=edges)
    cause = second_cause(state)
    if cause is not None and next_for_cause(state, cause) is not None:
        return Answer(kind="open", edges=edges, second=cause)
    if len(edges) > 1 or cause is not None:
        return Answer(kind="several", edges=edges, second=cause)
    if len(edges[0].answer) > 1:
        return Answer(kind="set", edges=edges)
    return Answer(kind="found" if is_sure(state) else "probable", edges=edges)


def second_cause(state: State) -> SecondCause | None:
    """Return where the bad end's own failure shows first, if the candidate at the edge next to it fails otherwise.

    Only if any failure counts, because --match and --metric define the cause.
    """
    bad_end, edges = state.end("bad"), find_edges(state.verdicts)
    if state.question.kind != "failure" or bad_end is None or not edges:
        return None
    at_edge, step = (edges[0].before, -1) if state.question.options.find_fix else (edges[-1].after, 1)
    ran = [index for index in range(at_edge, bad_end + step, step) if state.verdicts.get(index) == "bad"]
    own = [index for index in ran if _fails_as(state.record(index), state.record(bad_end))]
    if not own or own[0] == at_edge or not state.record(at_edge).decisive:
        return None
    return SecondCause(own[0], tuple(ran[: ran.index(own[0])]))


def next_for_cause(state: State, cause: SecondCause) -> int | None:
    """Return the candidate to run next to find where the bad end's own failure begins.

    First as if the other failure had ended there, then as if it hid it, for as many runs as the first took at most.
    """
    low, high = sorted((cause.hidden[0], cause.seen))
    known: dict[int, Verdict] = dict.fromkeys((i for i in state.verdicts if low < i < high), "skip")
    near = cause.hidden[-1]
    between: dict[int, Verdict] = {i: v for i, v in known.items() if min(near, cause.seen) < i < max(near, cause.seen)}
    found = next_candidate({**between, near: "good", cause.seen: "bad"}, state.closed_indices)
    if found is None and len(cause.hidden) <= 2 * steps_left(high - low):
        found = next_candidate({**known, cause.hidden[0]: "good", cause.seen: "bad"}, state.closed_indices)
    return found


def _fails_as(record: Record, end: Record) -> bool:
    causes = [each.cause for each in end.attempts if each.verdict == "bad"]
    if record is end or not record.decisive or not causes:
        return True
    return any(same_cause(record.decisive.cause, each) for each in causes)


def pattern_for(wanted: Attempt, other: Attempt) -> str:
    """Return a value of --match that finds the one failure and not the other; "" if their words are the same."""
    if wanted.slug and wanted.slug != other.slug:
        return wanted.slug
    return max((text for text in literal_parts(wanted.failure) if text not in other.failure), key=len, default="")


def sentences(state: State, answer: Answer) -> list[str]:
    edges = answer.edges
    if answer.kind == "several":
        lines = ["There are two causes, or more: the bad end fails otherwise than the candidate at the edge."]
        if len(edges) > 1:
            lines = [
                f"There are {len(edges)} places where the verdict changes, so there is more than one cause, or the failure"
                " comes and goes (--repeat):"
            ]
        lines += [_describe_edge(state, edge) for edge in edges]
        lines += _describe_second(state, answer.second) if answer.second else []
    else:
        lines = [_describe_edge(state, edges[0]), *_masked(state, edges[0]), *_other_words(state, edges[0])]
    sides = dict.fromkeys(index for edge in edges for index in (edge.before, edge.after))
    lines += filter(None, (describe_unmet(state, state.record(index)) for index in sides))
    lines += describe_limit(state, edges[0] if len(edges) == 1 else None)
    lines += _describe_confidence(state)
    unrun = len(state.candidates) - len(state.verdicts.keys() | state.closed_indices)
    if unrun and answer.kind != "several":
        lines.append(
            f"{unrun} other candidates were not run; a failure that came and went among them would not show (--second-look N)."
        )
    return lines


def _describe_edge(state: State, edge: Edge) -> str:
    what = "commit" if state.question.options.git else "release"
    before, after = (state.candidates[i].label for i in (edge.before, edge.after))
    first, last = ("bad", "good") if state.verdicts[edge.before] == "good" else ("good", "bad")
    is_probably = "is" if is_sure(state) else "is probably"
    if len(edge.answer) == 1:
        return f"The first {first} {what} {is_probably} {after}; the last {last} one is {before}."
    among = [state.candidates[i] for i in edge.answer]
    return (
        f"The first {first} {what} {is_probably} one of {len(among)}: {labels(among, 12)}. The last that is known to be {last}"
        f" is {before}, and what lies between could not be classified."
    )


def describe_unmet(state: State, record: Record) -> str:
    """Return a sentence if a candidate ran over packages that it does not ask for: the answer is of that mix."""
    lacks = unmet_requirements(record.paths, state.question.options.package, record.freeze)
    others = [each for each in lacks if each.has]
    parts = [f"{each.package} {each.has} (it asks for {each.wants})" for each in others[:MOST_NAMED]]
    if len(others) > MOST_NAMED:
        parts.append(f"{len(others) - MOST_NAMED} others that it does not ask for")
    with_others = [f"with {', '.join(parts)}"] if parts else []
    without = [f"without {len(lacks) - len(others)} of its requirements"] if len(lacks) > len(others) else []
    instead = "; without --only-package it gets its own" if state.question.options.only_package else ""
    return f"{record.name[:12]} ran {', '.join([*with_others, *without])}{instead}." if lacks else ""


def _describe_confidence(state: State) -> list[str]:
    sure, rate, options = confidence(state), failure_rate(state), state.question.options
    if sure is None or rate is None:
        return []
    lines = [
        f"The answer is right with a probability of {min(sure, 0.999):.1%}, if each bad one fails as often as the bad end, which"
        f" after its first failure failed in {rate.failed} of {rate.runs} runs."
    ]
    if not is_sure(state):
        more, above = repeat_needed(state), f"a --confirm above {options.confirm}"
        remedy = f"--repeat {more}, or {above}," if more else above
        lines.append(f"That is less than --confidence {options.confidence}: {remedy} would do.")
    return lines


def _masked(state: State, edge: Edge) -> list[str]:
    hidden = [index for index in edge.answer if state.verdicts.get(index) == "other"]
    if not hidden:
        return []
    reasons = list(dict.fromkeys(state.record(i).reason for i in hidden))
    listed = labels([state.candidates[i] for i in hidden], 12)
    return [f"Another failure masks it in {len(hidden)}: {listed}. There they fail with: {'; '.join(reasons[:3])}."]


def _other_words(state: State, edge: Edge) -> list[str]:
    """Return the bad end's failure, if the one at the edge has other words and still counts as the same."""
    bad_end, at_edge = state.end("bad"), edge.before if state.question.options.find_fix else edge.after
    if state.question.kind != "failure" or bad_end is None or bad_end == at_edge:
        return []
    end, near = (state.record(index) for index in (bad_end, at_edge))
    if not end.decisive or not near.decisive or end.decisive.cause.shape == near.decisive.cause.shape:
        return []
    return [f"The bad end {end.name[:12]} fails with other words, taken for the same cause: {end.reason.rstrip('.')}."]


def _describe_second(state: State, cause: SecondCause) -> list[str]:
    """Return the failure at the edge, where the bad end's own one shows, and what may hide it in between."""
    first, seen = cause.hidden[0], cause.seen
    seen_first, before = ("last", "after") if seen < first else ("first", "before")
    reasons = [state.record(index).reason.rstrip(".") for index in (first, seen)]
    hiding = labels([state.candidates[index] for index in sorted(cause.hidden)], 12)
    lines = [
        f"{state.candidates[first].label} fails with: {reasons[0]}.",
        f"The bad end's own failure is {seen_first} seen at {state.candidates[seen].label}: {reasons[1]}. What was run {before}"
        f" it fails otherwise, which may hide it: {hiding}.",
    ]
    own, edge = state.record(seen).decisive, state.record(first).decisive
    assert own and edge
    if differ_only_in_place(own.cause, edge.cause):
        lines.append(
            f"The message is the same, but it comes from {own.place} in place of {edge.place}; a function that was renamed"
            " looks like this too."
        )
    elif pattern := pattern_for(own, edge):
        lines.append(f"--match {quote(pattern)} looks for the bad end's failure alone.")
    return lines


def candidate_rows(state: State) -> list[tuple[str, str, str, str]]:
    """Return label, verdict, seconds and reason of what is known, in order, and how many candidates lie between."""
    verdicts, closed = state.verdicts, state.closed_indices
    rows = []
    for known, stretch in groupby(range(len(state.candidates)), key=lambda index: index in verdicts or index in closed):
        indices = list(stretch)
        if not known:
            rows.append((f"  {len(indices)} more", "", "", ""))
        for index in indices if known else ():
            cells = ("skip", "", state.closed.get(state.candidates[index].name, "")[:100])
            if index in verdicts:
                record = state.record(index)
                cells = (record.verdict, f"{record.seconds:.1f}", record.reason[:100])
            rows.append((state.candidates[index].label[:40], *cells))
    return rows


def as_dict(state: State, answer: Answer) -> dict[str, Any]:
    """Return `answer` of state.json: its kind, exit code, edges by candidates' names, and sentences."""
    names = [candidate.name for candidate in state.candidates]
    edges = [
        {"before": names[edge.before], "after": names[edge.after], "among": [names[index] for index in edge.answer]}
        for edge in answer.edges
    ]
    lines = sentences(state, answer) if answer.kind != "open" else []
    return {"kind": answer.kind, "exit_code": EXIT_CODES[answer.kind], "edges": edges, "sentences": lines}


def refused_answer(sentence: str) -> dict[str, Any]:
    """Return the same if there is nothing to bisect between the ends: both are good, or one could not be classified."""
    return {"kind": "refused", "exit_code": 2, "edges": [], "sentences": [sentence]}


def status_json(state: State, process: int | None) -> str:
    """Return `status --json`, without secrets. process: the one that runs the bisect now."""
    answer = answer_of(state)
    verdicts = [
        {"name": record.name, "verdict": record.verdict, "reason": record.reason, "seconds": record.seconds}
        | {"log": record.decisive.log if record.decisive else ""}
        for record in state.records
    ]
    found = state.answer if answer.kind == "open" and state.answer else as_dict(state, answer)
    whole = {"answer": found, "verdicts": verdicts, "not_run": state.closed, "process": process}
    return json.dumps(_redacted(whole), indent=1)


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _redacted(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_redacted(each) for each in value]
    return redact.text(value) if isinstance(value, str) else value
