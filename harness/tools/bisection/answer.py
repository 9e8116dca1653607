"""What a bisect's verdicts answer, and the sentences that say it."""

from dataclasses import dataclass
from shlex import quote
from typing import Literal

from harness.tools.bisection.candidates import labels
from harness.tools.bisection.confidence import CONFIDENCE, confidence, failure_rate, is_sure
from harness.tools.bisection.failures import cause_of, pattern_for, same_cause
from harness.tools.bisection.installation import unmet_requirements
from harness.tools.bisection.search import Edge, Verdict, find_edges, next_candidate
from harness.tools.bisection.state import Attempt, Record, State

Outcome = Literal["not run", "confirmed", "flaky", "another cause", "another failure"]
"""Of the revert. flaky: the newer end ended differently when it was run again. another cause: the revert changes nothing.
another failure: without the commit the newer end fails in a way of its own, or cannot be run."""
AnswerKind = Literal["found", "probable", "set", "several"]
EXIT_CODES: dict[AnswerKind, int] = {"found": 0, "probable": 1, "set": 1, "several": 3}


@dataclass(frozen=True, slots=True)
class SecondCause:
    """The bad end fails in another way than the candidate at the edge. The order is from the edge to the bad end."""

    seen: int
    """The candidate nearest to the edge that fails as the bad end does."""
    hidden: tuple[int, ...]
    """The bad candidates between the edge and `seen`. They fail in another way, which may hide the bad end's failure."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The edges, where good turns to bad or bad to good, oldest first, and what they mean.

    found: one edge, between two neighbours. probable: the same, but by chance it may be wrong. set: the edge is somewhere
    among candidates that cannot be classified. several: more than one cause.
    """

    kind: AnswerKind
    edges: tuple[Edge, ...]
    second: SecondCause | None = None
    """Where the bad end's own failure shows, if the first bad candidate fails in another way."""


def answer_of(state: State) -> Answer:
    """Return what the verdicts answer once no further run can narrow it."""
    edges, cause = tuple(find_edges(state.verdicts)), second_cause(state)
    if len(edges) > 1 or cause:
        return Answer(kind="several", edges=edges, second=cause)
    if len(edges[0].answer) > 1:
        return Answer(kind="set", edges=edges)
    if outcome_of(state) == "another cause":
        return Answer(kind="several", edges=edges)
    return Answer(kind="found" if _is_steady(state) else "probable", edges=edges)


def _is_steady(state: State) -> bool:
    """Return whether runs of the same candidate ended alike often enough."""
    return is_sure(state) and outcome_of(state) != "flaky"


def edge_to_confirm(state: State) -> Edge | None:
    """Return the edge whose commit can be reverted on top of the newer end.

    None without --git, if no single commit was found, or if it is the newer end: without it that is the commit before.
    """
    if not state.question.options.git or answer_of(state).kind not in ("found", "probable"):
        return None
    edge = find_edges(state.verdicts)[0]
    return None if edge.after == len(state.candidates) - 1 else edge


def outcome_of(state: State) -> Outcome:
    """Return what the revert of the commit found says about it."""
    if not (made := state.confirmation) or not (reverted := made.reverted):
        return "not run"
    older, newer = state.record(0), state.record(len(state.candidates) - 1)

    def ends_as(record: Record, end: Record) -> bool:
        is_plain = end.verdict == "good" or state.question.kind != "failure"  # --match and --hang know one failure
        return record.verdict == end.verdict and (is_plain or _fails_as(record, end))

    if ends_as(reverted, newer):
        return "another cause"
    if not ends_as(reverted, older):
        return "another failure"
    return "confirmed" if made.control and ends_as(made.control, newer) else "flaky"


def second_cause(state: State) -> SecondCause | None:
    """Return where the bad end's own failure shows first; None if the candidate at the edge fails in the same way.

    With --match and --hang there is only one failure to look for.
    """
    if state.question.kind != "failure":
        return None
    edges, bad_end = find_edges(state.verdicts), state.bad_end
    at_edge, step = (edges[0].before, -1) if state.question.options.find_fix else (edges[-1].after, 1)
    ran = [index for index in range(at_edge, bad_end + step, step) if state.verdicts.get(index) == "bad"]
    own = [index for index in ran if _fails_as(state.record(index), state.record(bad_end))]
    if own[0] == at_edge:
        return None
    return SecondCause(own[0], tuple(ran[: ran.index(own[0])]))


def next_for_cause(state: State) -> int | None:
    """Return the candidate to run next to find where the bad end's own failure follows another one; None if it is known."""
    if not (cause := second_cause(state)):
        return None
    near, inner = cause.hidden[-1], range(*sorted((cause.hidden[-1], cause.seen)))
    known: dict[int, Verdict] = dict.fromkeys((index for index in state.verdicts if index in inner), "skip")
    return next_candidate({**known, near: "good", cause.seen: "bad"})


def _fails_as(record: Record, end: Record) -> bool:
    """Return whether the candidate fails as the bad end did in one of its runs."""
    assert record.decisive
    causes = [cause_of(each) for each in end.attempts if each.verdict == "bad"]
    return any(same_cause(cause_of(record.decisive), each) for each in causes)


def sentences(state: State, answer: Answer) -> list[str]:
    edges, options = answer.edges, state.question.options
    if len(edges) > 1:
        lines = [
            f"The verdict changes in {len(edges)} places: there are several causes, or a flaky one (try --repeat)."
        ]
    elif answer.second:
        lines = ["There are two causes or more: the bad end fails in another way than the first bad candidate."]
    else:
        lines = []
    lines += [_describe_edge(state, edge) for edge in edges]
    if answer.second:
        lines += _describe_second(state, answer.second)
    elif len(edges) == 1:
        lines += _masked(state, edges[0])
        lines += describe_confirmation(state, edges[0])
    if options.only_package:
        sides = dict.fromkeys(index for edge in edges for index in (edge.before, edge.after))
        lines += filter(None, (describe_unmet(state.record(index), options.package) for index in sides))
    sure, rate = confidence(state), failure_rate(state)
    if sure is not None and rate:
        lines.append(
            f"The answer is right with a probability of {min(sure, 0.999):.1%}, if every bad release fails as often as the bad"
            f" end, which failed in {rate.failed} of {rate.runs} runs after its first failure."
        )
        if not is_sure(state):
            lines.append(f"That is less than {CONFIDENCE:.0%}: give more --repeat or more --confirm.")
    unrun = len(state.candidates) - len(state.records)
    if unrun and answer.kind != "several":
        were = "candidate was" if unrun == 1 else "candidates were"
        lines.append(f"{unrun} {were} not run: a failure that came and went among them would not show.")
    return lines


def _describe_edge(state: State, edge: Edge) -> str:
    what = "commit" if state.question.options.git else "release"
    before, after = (state.candidates[i].label for i in (edge.before, edge.after))
    first, last = ("bad", "good") if state.verdicts[edge.before] == "good" else ("good", "bad")
    is_probably = "is" if _is_steady(state) else "is probably"
    if len(edge.answer) == 1:
        return f"The first {first} {what} {is_probably} {after}; the last {last} one is {before}."
    among = labels(state.candidates[i] for i in edge.answer)
    return (
        f"The first {first} {what} {is_probably} one of {len(edge.answer)}: {among}. The last one known to be {last} is"
        f" {before}; those in between could not be classified."
    )


def describe_confirmation(state: State, edge: Edge) -> list[str]:
    """Say what the commit's revert on top of the newer end shows, and what that means."""
    options, made, outcome = state.question.options, state.confirmation, outcome_of(state)
    if not options.git or len(edge.answer) > 1:
        return []
    is_end = edge.after == len(state.candidates) - 1
    if made is None and not is_end:
        return []
    commit, before, tip = (state.candidates[i].name[:12] for i in (edge.after, edge.before, -1))
    passes = {"good": "passes", "bad": "fails"}
    older, newer = (passes[str(state.record(i).verdict)] for i in (0, len(state.candidates) - 1))
    end = f"the {'good' if options.find_fix else 'bad'} end {tip}"
    fixed = "repaired" if options.find_fix else "broke"
    if made is None:
        return [f"{commit} is {end.replace(tip, 'itself')}: without it the files are those of {before}, which {older}."]
    neighbours = f"what remains is that {before} {older} and {commit} {newer}"
    if not made.reverted:
        return [f"Not confirmed: {commit} cannot be reverted on top of {end}: {made.problem}; {neighbours}."]
    without = f"with {commit} reverted on top of {end}, it"
    reason = made.reverted.reason.rstrip(".")
    match outcome:
        case "confirmed":
            return [f"Confirmed: {without} {older}; {end} itself, run again right after, {newer} as before."]
        case "flaky":
            return [
                f"Not confirmed: {without} {older}, but {end}, run again right after, did not end as before. The failure"
                " comes and goes; give --repeat."
            ]
        case "another cause":
            still = f"{without} still {newer}{'' if newer == 'passes' else f': {reason}'}"
            return [
                f"Not the only cause: {still}. So a later commit {fixed} it too, or repeats these changes: look for that one as well."
            ]
        case _:
            if made.reverted.verdict == "bad" and made.reverted.decisive:
                reason = _with_place(made.reverted.decisive)
            return [
                f"Not confirmed: {without} ends in another way: {reason}. Either later commits need this one, or one of them"
                f" {fixed} something too; {neighbours}."
            ]


def describe_unmet(record: Record, package: str) -> str:
    """Return a sentence if a candidate ran over other packages than it asks for; "" if it had what it needs."""
    lacks = unmet_requirements(record.environment, package)
    parts = [f"with {name} {has} (it asks for {wants})" for name, (wants, has) in lacks.items() if has]
    absent = sum(not has for _, has in lacks.values())
    parts += [f"without {absent} of its dependencies"] if absent else []
    remedy = "leave out --only-package to install what it asks for"
    return f"{record.name} was tested {', '.join(parts)}; {remedy}." if parts else ""


def _masked(state: State, edge: Edge) -> list[str]:
    hidden = [index for index in edge.answer if state.verdicts.get(index) == "other"]
    if not hidden:
        return []
    reasons = list(dict.fromkeys(state.record(i).reason for i in hidden))
    listed = labels(state.candidates[i] for i in hidden)
    return [f"Another failure masks it in {len(hidden)}: {listed}. There they fail with: {'; '.join(reasons[:3])}."]


def _describe_second(state: State, cause: SecondCause) -> list[str]:
    """Say how the edge fails, where the bad end's own failure shows first, and which candidates may hide it."""
    first, seen = cause.hidden[0], cause.seen
    seen_first, before = ("last", "after") if seen < first else ("first", "before")
    edge, own = (state.record(index).decisive for index in (first, seen))
    assert own and edge
    there, here = (_with_place(each) for each in (edge, own))
    hiding = labels(state.candidates[index] for index in sorted(cause.hidden))
    pattern = pattern_for(own.failure, edge.failure)
    return [
        f"{state.candidates[first].label} fails with: {there}.",
        f"The bad end's own failure is {seen_first} seen at {state.candidates[seen].label}: {here}. The candidates run"
        f" {before} it fail in the other way, which may hide it: {hiding}.",
        *([f"--match {quote(pattern)} looks for the bad end's failure alone."] if pattern else []),
    ]


def _with_place(made: Attempt) -> str:
    failure, reason = made.failure, made.reason.rstrip(".")
    is_bare = not cause_of(made).words  # for example an assert without a message
    code = f": {failure.source}" if is_bare and failure.source else ""
    return f"{reason} (in {failure.place}{code})" if failure.place else reason
