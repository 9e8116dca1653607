"""Which candidate to run next, and what the verdicts so far show.

Pure functions over candidates 0 to n - 1, oldest first.

This is the binary search of `git bisect`: what cannot be classified is stepped over. git itself is not used for it,
because it can neither tell two failures apart nor find several edges.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Verdict = Literal["good", "bad", "skip", "other"]
"""skip: it cannot be installed or run here. other: it failed, but not with the failure that --match or --hang looks
for."""
DECIDED = ("good", "bad")


@dataclass(frozen=True, slots=True)
class Edge:
    """Two neighbours among the decided candidates, one good and one bad."""

    before: int
    after: int

    @property
    def answer(self) -> range:
        """Return the candidates of which one is the first with the newer verdict."""
        return range(self.before + 1, self.after + 1)


def find_edges(verdicts: Mapping[int, Verdict]) -> list[Edge]:
    """Return every place where the verdict changes, oldest first. Several mean several causes, or a flaky failure."""
    decided = sorted(index for index, verdict in verdicts.items() if verdict in DECIDED)
    return [Edge(low, high) for low, high in pairwise(decided) if verdicts[low] != verdicts[high]]


def untested(edge: Edge, verdicts: Mapping[int, Verdict]) -> list[int]:
    """Return the candidates inside the edge that may still be run."""
    return [index for index in range(edge.before + 1, edge.after) if index not in verdicts]


def next_candidate(verdicts: Mapping[int, Verdict]) -> int | None:
    """Return what to run next once both ends have a verdict; None when no run can narrow any edge."""
    for edge in find_edges(verdicts):
        if left := untested(edge, verdicts):
            skipped = [index for index in range(edge.before + 1, edge.after) if index not in left]
            return _middle(left, skipped)
    return None


def _middle(left: Sequence[int], skipped: Sequence[int]) -> int:
    """Return a candidate near the middle, as far from skipped ones as log2 steps allow, because skips come in
    clusters.
    """
    most = (1 << (len(left).bit_length() - 1)) - 1  # untested ones that the other steps can still decide
    allowed = range(max(0, len(left) - 1 - most), min(len(left) - 1, most) + 1)
    middle = (len(left) - 1) / 2

    def preference(position: int) -> tuple[float, float]:
        return (-min((abs(left[position] - other) for other in skipped), default=0), abs(position - middle))

    return left[min(allowed, key=preference)]
