"""Which candidate to run next, and what the verdicts so far show. Pure functions over candidates 0 to n - 1, oldest first.

A binary search that straddles what cannot be classified, as `git bisect` does. For a pattern with one edge it takes at most
ceil(log2 n) + 2 runs, and one more for each skip. git itself is not used for it: it knows neither another failure ("other"),
nor a second edge, nor which two candidates to install while one runs.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Verdict = Literal["good", "bad", "skip", "other"]
"""other: it failed, but not with the failure that is looked for. Straddled like a skip."""
DECIDED = ("good", "bad")


@dataclass(frozen=True, slots=True)
class Edge:
    """Two decided candidates with none decided between them, one good and one bad."""

    before: int
    after: int

    @property
    def answer(self) -> range:
        """Return the candidates of which one is the first with the newer verdict."""
        return range(self.before + 1, self.after + 1)


def find_edges(verdicts: Mapping[int, Verdict]) -> list[Edge]:
    """Return every place where the verdict changes, oldest first; several mean several causes, or a flaky failure."""
    decided = sorted(index for index, verdict in verdicts.items() if verdict in DECIDED)
    return [Edge(low, high) for low, high in pairwise(decided) if verdicts[low] != verdicts[high]]


def untested(edge: Edge, verdicts: Mapping[int, Verdict], closed: Collection[int] = ()) -> list[int]:
    """Return candidates inside the edge that may still be run. closed: those that cannot be installed or imported."""
    return [index for index in range(edge.before + 1, edge.after) if index not in verdicts and index not in closed]


def next_candidate(verdicts: Mapping[int, Verdict], closed: Collection[int] = ()) -> int | None:
    """Return what to run next, once both ends have a verdict; None when no run can narrow any edge."""
    for edge in find_edges(verdicts):
        if left := untested(edge, verdicts, closed):
            return _middle(left, [i for i in range(edge.before + 1, edge.after) if i not in left])
    return None


def next_two(verdicts: Mapping[int, Verdict], index: int, closed: Collection[int] = ()) -> list[int]:
    """Return what comes after `index`, whichever way its run ends; the likelier first."""
    outcomes: tuple[Verdict, ...] = ("good", "bad", "skip")
    following = (next_candidate({**verdicts, index: outcome}, closed) for outcome in outcomes)
    return list(dict.fromkeys(i for i in following if i is not None))[:2]


def steps_left(count: int) -> int:
    """Return the runs that decide among `count` untested candidates inside one edge, in the worst case without skips."""
    return count.bit_length()


def longest_unrun(count: int, verdicts: Mapping[int, Verdict], closed: Collection[int], edge: Edge) -> list[int]:
    """Return the longest stretch outside the edge in which nothing was run: a second edge could hide there."""
    found: list[list[int]] = [[]]
    for index in range(count):
        if index in verdicts or index in edge.answer:
            found.append([])
        elif index not in closed:
            found[-1].append(index)
    return max(found, key=len)


def _middle(left: Sequence[int], skipped: Sequence[int]) -> int:
    """Return the candidate as far from skipped ones as the bound allows, because skips come in clusters."""
    most = (1 << (steps_left(len(left)) - 1)) - 1  # untested ones that the other steps can still decide
    allowed = range(max(0, len(left) - 1 - most), min(len(left) - 1, most) + 1)
    middle = (len(left) - 1) / 2

    def preference(position: int) -> tuple[float, float]:
        return (-min((abs(left[position] - other) for other in skipped), default=0), abs(position - middle))

    return left[min(allowed, key=preference)]
