"""How sure an answer is if its failure comes and goes (--repeat), and what to run again to make it surer.

A bad release that passed each time was taken for a good one: then the first bad one is older. Each candidate is as likely to
be the first bad one as any other, and each bad one fails as often as the bad end does. That rate is known through the bad
end's runs only: a Beta distribution, of those after its first failure, as without that one there would have been no bisect.
"""

from dataclasses import dataclass
from math import exp, lgamma

from harness.tools.bisection.search import Edge, find_edges
from harness.tools.bisection.state import State

BAD_END_FAILURES = 12
"""Failures of the bad end that give its rate well enough; no more than half of --confirm is spent on them."""
MARGIN = 0.75
"""Of the doubt that --confidence leaves: to stop at the first moment that looks sure enough favours luck."""


@dataclass(frozen=True, slots=True)
class FailureRate:
    """How often a bad release fails, by `failed` of `runs` runs."""

    failed: int
    runs: int

    def all_pass(self, runs: int) -> float:
        """Return the probability of so many passes: the Beta distribution's integral of (1 - rate) ** runs."""
        failed, passed = max(self.failed, 0.5), self.runs - self.failed + 0.5
        return exp(lgamma(passed + runs) - lgamma(passed) + lgamma(failed + passed) - lgamma(failed + passed + runs))


@dataclass(frozen=True, slots=True)
class Rerun:
    """A candidate to run again, up to `runs` times or until it has failed `failures` times."""

    index: int
    runs: int
    failures: int = 1


def failure_rate(state: State) -> FailureRate | None:
    """Return that of the bad end's runs after its first failure; None if chance has no part in the answer."""
    options, bad_end = state.question.options, state.end("bad")
    by_chance = options.repeat > 1 and state.question.kind != "metric"  # of a number, the median is compared
    if not by_chance or bad_end is None or not (attempts := state.record(bad_end).attempts):
        return None
    failed = [attempt.verdict == "bad" for attempt in attempts]
    after = failed[failed.index(True) + 1 :] if True in failed else []
    return FailureRate(sum(after), len(after))


def confidence(state: State) -> float | None:
    """Return the probability that the one edge is where it is; None if chance has no part in it."""
    edges, rate = find_edges(state.verdicts), failure_rate(state)
    return _confidence(state, edges[0], rate) if len(edges) == 1 and rate else None


def is_sure(state: State) -> bool:
    sure = confidence(state)
    return sure is None or sure >= state.question.options.confidence


def next_rerun(state: State) -> Rerun | None:
    """Return what to run again to be as sure as was asked; None if that is reached, or --confirm runs were spent."""
    edges, rate, options = find_edges(state.verdicts), failure_rate(state), state.question.options
    left, bad_end = options.confirm - runs_spent(state), state.end("bad")
    if not edges or rate is None or bad_end is None or left <= 0:
        return None
    for_rate = options.confirm // 2 - _extra_runs(state, bad_end)
    if rate.failed < BAD_END_FAILURES - 1 and for_rate > 0:
        return Rerun(bad_end, for_rate, BAD_END_FAILURES - 1 - rate.failed)
    wanted = 1 - MARGIN * (1 - options.confidence)
    for index in _between_bad_ones(state):
        runs = len(state.record(index).attempts)
        if rate.all_pass(runs) > 1 - wanted:
            return Rerun(index, min(left, runs))
    if len(edges) > 1 or _confidence(state, edges[0], rate) >= wanted:
        return None
    more = 1
    while more < left and _confidence(state, edges[0], rate, more) < wanted:
        more += 1
    return Rerun(_last_good(state, edges[0]), more)


def runs_spent(state: State) -> int:
    return sum(_extra_runs(state, index) for index in state.verdicts)


def _extra_runs(state: State, index: int) -> int:
    return max(0, len(state.record(index).attempts) - state.question.options.repeat)


def _confidence(state: State, edge: Edge, rate: FailureRate, more: int = 0) -> float:
    """Return it with so many further passes of the last good candidate."""
    wrong, passed, last, good_end = 0.0, more, _last_good(state, edge), _good_end(state)
    for index in range(last, good_end, 1 if good_end > last else -1):
        if state.verdicts.get(index) == "good":
            if state.record(index).replayed:
                break  # what a log says is not in doubt
            passed += len(state.record(index).attempts)
        wrong += rate.all_pass(passed)
    return len(edge.answer) / (len(edge.answer) + wrong)


def _good_end(state: State) -> int:
    good_end = state.end("good")
    assert good_end is not None
    return good_end


def _last_good(state: State, edge: Edge) -> int:
    return edge.before if state.verdicts[edge.before] == "good" else edge.after


def _between_bad_ones(state: State) -> list[int]:
    """Return good candidates that have a bad one between them and the good end: they may only have been lucky."""
    found, behind = [], False
    for index in sorted(state.verdicts, reverse=_good_end(state) > 0):
        behind = behind or state.verdicts[index] == "bad"
        if behind and state.verdicts[index] == "good":
            found.append(index)
    return found
