"""Ranks in sentences: "rank 3", "ranks 0-3, 8", and which ranks have which value."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")


def runs(numbers: Sequence[int]) -> str:
    """Write numbers in their order, with runs of three and more shortened: (0, 1, 2, 3, 8) -> "0-3, 8"."""
    groups = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    found = [[number for _, number in group] for _, group in groups]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in found)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0-3, 8"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {runs(sorted(ranks))}"


def ranks_by(values: Mapping[int, T]) -> dict[T, tuple[int, ...]]:
    """Return value -> the ranks that have it, ordered by the first rank of each. values: rank -> value."""
    found: dict[T, tuple[int, ...]] = {}
    for rank, value in values.items():
        found[value] = (*found.get(value, ()), rank)
    return found


def values_in_words(values: Mapping[int, object]) -> str:
    """Return "0 on ranks 0, 2; unset on rank 1". values: rank -> value; None is unset, and an empty string is shown as
    "".
    """
    words = {value: "unset" if value is None else str(value) or '""' for value in values.values()}
    return "; ".join(f"{words[value]} on {ranks_in_words(ranks)}" for value, ranks in ranks_by(values).items())
