"""Rewards of configs/cpu/addition.toml: 47+85= is to be answered by 1213, the sums of the ones and of the tens with the
carry.
"""

from typing import Any


def score(*, data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Return the share of the four digits that are right; of a held-out row, 1.0 where the number is, else 0.0.

    The number is the sum of the tens, then the last digit of the sum of the ones.
    """
    expected = extra_info["answer"].partition(" ")[0]
    if data_source == "addition/test":
        return float(len(solution_str) == 4 and (solution_str[2:] + solution_str[1]).lstrip("0") == ground_truth)
    return sum(digit == right for digit, right in zip(solution_str, expected, strict=False)) / len(expected)
