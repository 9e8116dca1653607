"""How sure an answer is whose failure comes and goes (--repeat), and what to run again to make it surer.

A bad release that passed each time was taken for a good one: then the first bad one is older. Each candidate is as likely to
be the first bad one as any other, and each bad one fails as often as the bad end does. Its rate is not known but through its
runs: a Beta distribution, of those after its first failure, as without that one there would have been no bisect at all.
"""

from dataclasses import dataclass
from math import exp, lgamma

from harness.tools.bisection import search
from harness.tools.bisection.search import Edge
from harness.tools.bisection.state import Record, State

BAD_END_FAILURES = 12
"""Of the bad end, before its rate is known well enough; for it no more than half of --confirm is spent."""
MARGIN = 0.75
"""Of the doubt that --confidence leaves: to stop at the first moment that looks sure enough favours luck."""
LONGEST_REPEAT = 10000


@dataclass(frozen=True, slots=True)
class Rate:
    """How often a bad release fails, by `failed` of `runs` runs."""

    failed: int
    runs: int

    def all_pass(self, runs: int) -> float:
        """The probability that a bad release passes so often in a row."""
        failed, passed = max(self.failed, 0.5), self.runs - self.failed + 0.5
        return exp(_log_beta(failed, passed + runs) - _log_beta(failed, passed))

    @property
    def shown(self) -> str:
        """For a sentence."""
        return f"{self.failed} of {self.runs}"


@dataclass(frozen=True, slots=True)
class Again:
    """Run this candidate again."""

    index: int
    runs: int
    failures: int = 1
    """After so many it is enough."""


def applies(state: State) -> bool:
    """Whether an answer can be a matter of luck: of a number, a median is compared."""
    return state.question.options.repeat > 1 and state.question.kind != "metric"


def rate_of(state: State) -> Rate | None:
    """Of the bad end's runs after its first failure; None while there is no bad end."""
    bad_end = state.end("bad")
    if bad_end is None or not (attempts := state.record(bad_end).attempts):
        return None
    failed = [attempt.verdict == "bad" for attempt in attempts]
    after = failed[failed.index(True) + 1 :] if True in failed else []
    return Rate(sum(after), len(after))


def confidence(state: State) -> float | None:
    """The probability that the one edge is where it is; None where no luck is in it."""
    edges = search.edges(state.verdicts)
    rate = rate_of(state)
    if not applies(state) or len(edges) != 1 or rate is None:
        return None
    return _confidence(state, edges[0], rate, 0)


def repeat_needed(state: State) -> int | None:
    """The --repeat with which the same runs would be as sure as was asked."""
    edges, rate = search.edges(state.verdicts), rate_of(state)
    if not edges or rate is None:
        return None
    low, high = 1, LONGEST_REPEAT
    beyond, wanted = _older(state, edges[0]), state.question.options.confidence
    if _sure(beyond * rate.all_pass(high), edges[0]) < wanted:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _sure(beyond * rate.all_pass(middle), edges[0]) >= wanted else (middle + 1, high)
    return low


def next_again(state: State) -> Again | None:
    """What to run again to be as sure as was asked; None where that is reached, or --confirm runs were spent."""
    edges, rate = search.edges(state.verdicts), rate_of(state)
    left = state.question.options.confirm - spent(state)
    if not applies(state) or not edges or rate is None or left <= 0:
        return None
    bad_end = state.end("bad")
    assert bad_end is not None
    for_rate = state.question.options.confirm // 2 - _extra(state, state.record(bad_end))
    if rate.failed < BAD_END_FAILURES - 1 and for_rate > 0:
        return Again(bad_end, for_rate, BAD_END_FAILURES - 1 - rate.failed)
    wanted = 1 - MARGIN * (1 - state.question.options.confidence)
    for index in _between_bad_ones(state):
        runs = len(state.record(index).attempts)
        if rate.all_pass(runs) > 1 - wanted:
            return Again(index, min(left, runs))
    if len(edges) > 1 or _confidence(state, edges[0], rate, 0) >= wanted:
        return None
    more = 1
    while more < left and _confidence(state, edges[0], rate, more) < wanted:
        more += 1
    return Again(_last_good(state, edges[0]), more)


def spent(state: State) -> int:
    """Runs beyond --repeat of each candidate."""
    return sum(_extra(state, record) for record in state.records)


def _extra(state: State, record: Record) -> int:
    return max(0, len(record.attempts) - state.question.options.repeat)


def _confidence(state: State, edge: Edge, rate: Rate, more: int) -> float:
    """more: with so many further passes of the last good one."""
    wrong, passed, last = 0.0, more, _last_good(state, edge)
    good_end = state.end("good")
    assert good_end is not None
    step = 1 if good_end > last else -1
    for index in range(last, good_end, step):
        if state.verdicts.get(index) == "good":
            if state.record(index).replayed:
                break  # what a log says is not in doubt
            passed += len(state.record(index).attempts)
        wrong += rate.all_pass(passed)
    return _sure(wrong, edge)


def _sure(wrong: float, edge: Edge) -> float:
    return len(edge.answer) / (len(edge.answer) + wrong)


def _older(state: State, edge: Edge) -> int:
    """Candidates from the last good one to the good end, that one left out."""
    good_end = state.end("good")
    assert good_end is not None
    return abs(good_end - _last_good(state, edge))


def _last_good(state: State, edge: Edge) -> int:
    """The good one of the edge's two."""
    return edge.before if state.verdicts[edge.before] == "good" else edge.after


def _between_bad_ones(state: State) -> list[int]:
    """Good candidates that have a bad one between them and the good end: they may only have been lucky."""
    good_end, found, behind = state.end("good"), [], False
    order = sorted(state.verdicts, reverse=good_end is not None and good_end > 0)
    for index in order:
        behind = behind or state.verdicts[index] == "bad"
        if behind and state.verdicts[index] == "good":
            found.append(index)
    return found


def _log_beta(a: float, b: float) -> float:
    return lgamma(a) + lgamma(b) - lgamma(a + b)
