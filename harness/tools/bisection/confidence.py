"""How sure an answer is if the failure comes and goes (--repeat), and what to run again to be surer.

The answer is wrong if a bad release passed every time and was taken for a good one: then the first bad one is older. We
assume that each candidate is as likely to be the first bad one as any other, and that each bad one fails as often as
the bad end. That rate is estimated by a Beta distribution from the bad end's runs after its first failure. The first
failure itself does not count, because without it there would be no bisect.
"""

from dataclasses import dataclass
from math import exp, lgamma

from harness.tools.bisection.search import Edge, find_edges
from harness.tools.bisection.state import State

CONFIDENCE = 0.95
"""An answer below this is called probable."""
WANTED = 1 - 0.75 * (1 - CONFIDENCE)
"""The confidence that reruns aim for. It is above CONFIDENCE, because stopping at the first moment that looks sure
enough would favour lucky runs."""
BAD_END_FAILURES = 12
"""So many failures of the bad end give its rate well enough. At most half of --confirm is spent on them."""


@dataclass(frozen=True, slots=True)
class FailureRate:
    """How often a bad release fails, known from `failed` of `runs` runs."""

    failed: int
    runs: int

    def all_pass(self, runs: int) -> float:
        """Return the probability that so many runs all pass: the mean of (1 - rate) ** runs over the Beta
        distribution.
        """
        failed, passed = max(self.failed, 0.5), self.runs - self.failed + 0.5
        return exp(lgamma(passed + runs) - lgamma(passed) + lgamma(failed + passed) - lgamma(failed + passed + runs))


@dataclass(frozen=True, slots=True)
class Rerun:
    """A candidate to run again, up to `runs` times or until it has failed `failures` times."""

    index: int
    runs: int
    failures: int = 1


def failure_rate(state: State) -> FailureRate | None:
    """Return the rate of the bad end's runs after its first failure; None without --repeat."""
    if state.question.options.repeat == 1:
        return None
    failed = [attempt.verdict == "bad" for attempt in state.record(state.bad_end).attempts]
    after = failed[failed.index(True) + 1 :]
    return FailureRate(sum(after), len(after))


def confidence(state: State) -> float | None:
    """Return the probability that the one edge is in the right place; None without --repeat, or with several edges."""
    edges, rate = find_edges(state.verdicts), failure_rate(state)
    return _confidence(state, edges[0], rate) if len(edges) == 1 and rate else None


def is_sure(state: State) -> bool:
    sure = confidence(state)
    return sure is None or sure >= CONFIDENCE


def next_rerun(state: State) -> Rerun | None:
    """Return what to run again to be sure; None if the answer is sure, or --confirm runs were spent."""
    edges, rate, options = find_edges(state.verdicts), failure_rate(state), state.question.options
    left = options.confirm - runs_spent(state)
    if rate is None or left <= 0:
        return None
    for_rate = options.confirm // 2 - _extra_runs(state, state.bad_end)
    if rate.failed < BAD_END_FAILURES - 1 and for_rate > 0:
        return Rerun(state.bad_end, for_rate, BAD_END_FAILURES - 1 - rate.failed)
    for index in _between_bad_ones(state):
        runs = len(state.record(index).attempts)
        if rate.all_pass(runs) > 1 - WANTED:
            return Rerun(index, min(left, runs))
    if len(edges) > 1 or _confidence(state, edges[0], rate) >= WANTED:
        return None
    more = 1
    while more < left and _confidence(state, edges[0], rate, more) < WANTED:
        more += 1
    return Rerun(last_good(state, edges[0]), more)


def runs_spent(state: State) -> int:
    return sum(_extra_runs(state, index) for index in state.verdicts)


def _extra_runs(state: State, index: int) -> int:
    return max(0, len(state.record(index).attempts) - state.question.options.repeat)


def _confidence(state: State, edge: Edge, rate: FailureRate, more: int = 0) -> float:
    """Return the confidence after `more` further passes of the last good candidate."""
    wrong, passed, last = 0.0, more, last_good(state, edge)
    for index in range(last, state.good_end, 1 if state.good_end > last else -1):
        if state.verdicts.get(index) == "good":
            passed += len(state.record(index).attempts)
        wrong += rate.all_pass(passed)
    return len(edge.answer) / (len(edge.answer) + wrong)


def last_good(state: State, edge: Edge) -> int:
    """Return the good candidate of the edge."""
    return edge.before if state.verdicts[edge.before] == "good" else edge.after


def _between_bad_ones(state: State) -> list[int]:
    """Return the good candidates with a bad one between them and the good end. They may only have been lucky."""
    found, behind = [], False
    for index in sorted(state.verdicts, reverse=state.good_end > 0):
        behind = behind or state.verdicts[index] == "bad"
        if behind and state.verdicts[index] == "good":
            found.append(index)
    return found
