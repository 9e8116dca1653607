"""The search itself, without side effects: which candidate to run next, and what the verdicts so far say.

Candidates are 0 to n - 1, oldest first. Binary search that straddles what cannot be judged, as `git bisect` does. Bound,
for a pattern with one edge: ceil(log2 n) + 2 runs, and one for each skip met.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Verdict = Literal["good", "bad", "skip", "other"]
"""other: it failed, but with another failure than the one that is looked for. Straddled like a skip."""
DECIDED = ("good", "bad")


@dataclass(frozen=True, slots=True)
class Edge:
    """Two decided candidates with none decided between them, of which one is good and one is bad."""

    before: int
    after: int

    @property
    def answer(self) -> range:
        """The candidates of which one is the first with the newer verdict."""
        return range(self.before + 1, self.after + 1)


def edges(verdicts: Mapping[int, Verdict]) -> list[Edge]:
    """Every place where the verdict changes, oldest first; more than one means several causes, or a flaky failure."""
    decided = sorted(index for index, verdict in verdicts.items() if verdict in DECIDED)
    return [Edge(low, high) for low, high in pairwise(decided) if verdicts[low] != verdicts[high]]


def unknown(edge: Edge, verdicts: Mapping[int, Verdict], closed: Collection[int] = ()) -> list[int]:
    """Candidates inside the edge that may still be run. closed: those that cannot be installed or imported."""
    return [index for index in range(edge.before + 1, edge.after) if index not in verdicts and index not in closed]


def next_candidate(verdicts: Mapping[int, Verdict], closed: Collection[int] = ()) -> int | None:
    """What to run next, once both ends have a verdict; None when no run can narrow any edge."""
    for edge in edges(verdicts):
        if untested := unknown(edge, verdicts, closed):
            skipped = [i for i in range(edge.before + 1, edge.after) if i not in untested]
            return _middle(untested, skipped)
    return None


def next_two(verdicts: Mapping[int, Verdict], index: int, closed: Collection[int] = ()) -> list[int]:
    """What comes after `index`, whichever way its run ends; the likelier first, none twice."""
    outcomes: tuple[Verdict, ...] = ("good", "bad", "skip")
    following = (next_candidate({**verdicts, index: outcome}, closed) for outcome in outcomes)
    return list(dict.fromkeys(i for i in following if i is not None))[:2]


def most_runs(candidates: int, skips: int = 0) -> int:
    """The bound: ceil(log2 candidates) + 2 + skips met."""
    return steps_left(candidates - 1) + 2 + skips


def steps_left(untested: int) -> int:
    """Runs that decide among `untested` candidates inside one edge, in the worst case, skips left aside."""
    return untested.bit_length()


def stretches(
    count: int, verdicts: Mapping[int, Verdict], closed: Collection[int], edge: Edge | None = None
) -> list[list[int]]:
    """Runs of neighbours outside the edge that nothing was run of, the longest first: a second edge could hide there."""
    found: list[list[int]] = []
    current: list[int] = []
    inside = set(edge.answer) if edge else set()
    for index in range(count):
        if index in verdicts or index in inside:
            found, current = [*found, current], []
        elif index not in closed:
            current.append(index)
    return sorted((stretch for stretch in [*found, current] if stretch), key=len, reverse=True)


def masks(answer: Sequence[int], verdicts: Mapping[int, Verdict]) -> list[int]:
    """Those of an answer whose other failure hides whether they have the one that is looked for."""
    return [index for index in answer if verdicts.get(index) == "other"]


def _middle(untested: Sequence[int], skipped: Sequence[int]) -> int:
    """As far from skipped candidates as the number of runs left in the worst case allows, for skips come in clusters."""
    steps = steps_left(len(untested))
    most = (1 << (steps - 1)) - 1  # untested ones that the other steps can still decide
    allowed = range(max(0, len(untested) - 1 - most), min(len(untested) - 1, most) + 1)
    middle = (len(untested) - 1) / 2

    def preference(position: int) -> tuple[float, float]:
        distance = min((abs(untested[position] - other) for other in skipped), default=0)
        return (-distance, abs(position - middle))

    return untested[min(allowed, key=preference)]
