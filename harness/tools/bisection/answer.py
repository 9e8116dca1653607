"""What a bisect's verdicts answer: in kind and edges, in sentences for people, and as a dictionary for programs."""

import math
from dataclasses import dataclass
from itertools import groupby, pairwise
from shlex import quote
from statistics import median
from typing import Any, Literal

from harness.tools.bisection.candidates import labels
from harness.tools.bisection.causes import cause_of, pattern_for, same_cause
from harness.tools.bisection.classify import limit_of
from harness.tools.bisection.confidence import confidence, failure_rate, is_sure
from harness.tools.bisection.installation import unmet_requirements
from harness.tools.bisection.search import Edge, Verdict, find_edges, next_candidate
from harness.tools.bisection.state import Record, State

AnswerKind = Literal["found", "probable", "set", "several", "open"]
EXIT_CODES: dict[AnswerKind, int] = {"found": 0, "probable": 1, "set": 1, "several": 3, "open": 4}


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
    edges, cause = tuple(find_edges(state.verdicts)), second_cause(state)
    more = next_candidate(state.verdicts, state.closed_indices)
    if not edges or more is not None or (cause and next_for_cause(state, cause) is not None):
        return Answer(kind="open", edges=edges)
    if len(edges) > 1 or cause:
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
    """Return the candidate to run next to find where the bad end's own failure follows the other one."""
    near, inner = cause.hidden[-1], range(*sorted((cause.hidden[-1], cause.seen)))
    known: dict[int, Verdict] = dict.fromkeys((index for index in state.verdicts if index in inner), "skip")
    return next_candidate({**known, near: "good", cause.seen: "bad"}, state.closed_indices)


def _fails_as(record: Record, end: Record) -> bool:
    causes = [cause_of(each) for each in end.attempts if each.verdict == "bad"]
    if record is end or not record.decisive or not causes:
        return True
    return any(same_cause(cause_of(record.decisive), each) for each in causes)


def sentences(state: State, answer: Answer) -> list[str]:
    edges, options = answer.edges, state.question.options
    if len(edges) > 1:
        lines = [f"There are {len(edges)} places where the verdict changes: several causes, or a flaky one (--repeat):"]
    elif answer.second:
        lines = ["There are two causes, or more: the bad end fails otherwise than the candidate at the edge."]
    else:
        lines = []
    lines += [_describe_edge(state, edge) for edge in edges]
    if answer.second:
        lines += _describe_second(state, answer.second)
    elif len(edges) == 1:
        lines += [*_masked(state, edges[0]), *_other_words(state, edges[0])]
    if options.only_package:
        sides = dict.fromkeys(index for edge in edges for index in (edge.before, edge.after))
        lines += filter(None, (describe_unmet(state.record(index), options.package) for index in sides))
    lines += _describe_limit(state, edges[0] if len(edges) == 1 else None)
    sure, rate = confidence(state), failure_rate(state)
    if sure is not None and rate:
        lines.append(
            f"The answer is right with a probability of {min(sure, 0.999):.1%}, if each bad one fails as often as the bad end,"
            f" which after its first failure failed in {rate.failed} of {rate.runs} runs."
        )
        if not is_sure(state):
            lines.append(f"That is less than --confidence {options.confidence}: more --repeat or --confirm would do.")
    unrun = len(state.candidates) - len(state.verdicts.keys() | state.closed_indices)
    if unrun and answer.kind != "several":
        lines.append(
            f"{unrun} others were not run; a failure that came and went there would not show (--second-look N)."
        )
    return lines


def _describe_edge(state: State, edge: Edge) -> str:
    what = "commit" if state.question.options.git else "release"
    before, after = (state.candidates[i].label for i in (edge.before, edge.after))
    first, last = ("bad", "good") if state.verdicts[edge.before] == "good" else ("good", "bad")
    is_probably = "is" if is_sure(state) else "is probably"
    if len(edge.answer) == 1:
        return f"The first {first} {what} {is_probably} {after}; the last {last} one is {before}."
    among = labels(state.candidates[i] for i in edge.answer)
    return (
        f"The first {first} {what} {is_probably} one of {len(edge.answer)}: {among}. The last that is known to be {last}"
        f" is {before}, and what lies between could not be classified."
    )


def describe_unmet(record: Record, package: str) -> str:
    """Return a sentence if a candidate ran over packages that it does not ask for: the answer is of that mix."""
    lacks = unmet_requirements(record.paths, package, record.freeze)
    parts = [f"{name} {has} (it asks for {wants})" for name, (wants, has) in lacks.items() if has]
    absent = [name for name, (_, has) in lacks.items() if not has]
    parts += [f"without {len(absent)} of its requirements"] if absent else []
    return f"{record.name} ran over {', '.join(parts)}; without --only-package it gets its own." if parts else ""


def number_of(record: Record) -> float | None:
    numbers = [attempt.value for attempt in record.attempts if attempt.value is not None]
    return median(numbers) if numbers else None


def reference(state: State) -> float | None:
    """Return the good end's number, once it is known to be good."""
    good = state.end("good")
    return number_of(state.record(good)) if good is not None and state.verdicts[good] == "good" else None


def _describe_limit(state: State, edge: Edge | None) -> list[str]:
    options, base = state.question.options, reference(state)
    limit = limit_of(options, state.question.ratio, base)
    if state.question.kind != "metric" or limit is None:
        return []
    where = "below" if options.below is not None else "above"
    times = f", {options.worse.rstrip('x')} times the good end's {base:.6g}" if options.worse else ""
    sentences = [f"{options.metric} is bad {where} {limit:.6g}{times}."]
    sign = (-1 if options.below is not None else 1) * (-1 if options.find_fix else 1)
    numbers = {
        state.index(record.name): number for record in state.records if (number := number_of(record)) is not None
    }

    def worsening(step: tuple[int, int]) -> float:
        change = sign * (numbers[step[1]] - numbers[step[0]])
        return math.inf if math.isnan(change) else change

    steps = list(pairwise(sorted(numbers)))
    crossing = next((step for step in steps if edge and edge.before <= step[0] and step[1] <= edge.after), None)
    if crossing and worsening(largest := max(steps, key=worsening)) > worsening(crossing):
        over, larger = (
            f"{' to '.join(state.candidates[index].label for index in step)}, {numbers[step[0]]:.6g} to {numbers[step[1]]:.6g}"
            for step in (crossing, largest)
        )
        sentences.append(f"The step over the limit ({over}) is not the largest, which is {larger}.")
    return sentences


def _masked(state: State, edge: Edge) -> list[str]:
    hidden = [index for index in edge.answer if state.verdicts.get(index) == "other"]
    if not hidden:
        return []
    reasons = list(dict.fromkeys(state.record(i).reason for i in hidden))
    listed = labels(state.candidates[i] for i in hidden)
    return [f"Another failure masks it in {len(hidden)}: {listed}. There they fail with: {'; '.join(reasons[:3])}."]


def _other_words(state: State, edge: Edge) -> list[str]:
    """Return the bad end's failure, if the one at the edge has other words and still counts as the same."""
    bad_end, at_edge = state.end("bad"), edge.before if state.question.options.find_fix else edge.after
    if state.question.kind != "failure" or bad_end is None:
        return []
    end, near = (state.record(index) for index in (bad_end, at_edge))
    if not end.decisive or not near.decisive or cause_of(end.decisive).shape == cause_of(near.decisive).shape:
        return []
    return [f"The bad end {end.name[:12]} fails with other words, taken for the same cause: {end.reason.rstrip('.')}."]


def _describe_second(state: State, cause: SecondCause) -> list[str]:
    """Return the failure at the edge, where the bad end's own one shows, and what may hide it in between."""
    first, seen = cause.hidden[0], cause.seen
    seen_first, before = ("last", "after") if seen < first else ("first", "before")
    edge, own = (state.record(index).decisive for index in (first, seen))
    assert own and edge
    there, here = (f"{each.reason.rstrip('.')}{each.place and f' (in {each.place})'}" for each in (edge, own))
    hiding = labels(state.candidates[index] for index in sorted(cause.hidden))
    pattern = pattern_for(own, edge)
    return [
        f"{state.candidates[first].label} fails with: {there}.",
        f"The bad end's own failure is {seen_first} seen at {state.candidates[seen].label}: {here}. What was run {before}"
        f" it fails otherwise, which may hide it: {hiding}.",
        *([f"--match {quote(pattern)} looks for the bad end's failure alone."] if pattern else []),
    ]


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
    return {
        "kind": answer.kind,
        "exit_code": EXIT_CODES[answer.kind],
        "edges": edges,
        "sentences": sentences(state, answer),
    }
