"""Rules that score a response, in [0, 1]. This module imports only the standard library.

harness/tools/rewards has those that need more: MATH, a row's data_source, and a user's own function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.task.data import Row

Score = Callable[[str, Any], float]
"""(response, ground truth) -> score in [0, 1]."""
Reward = Callable[[str, "Row"], float]
"""(response, row) -> score."""
MakeReward = Callable[[Iterable["Row"]], Reward]
"""(rows that it will score) -> the reward. Raises ValueError if it cannot score one of them."""

_MARK = "####"
# A response may be one character many thousand times, so these take time in proportion to its length: the first is
# matched with the text backwards, from its end, and possessive quantifiers (*+) keep what they took.
_MARKS_AT_THE_END = re.compile(rf"\s*+(?:{_MARK}\s*+)*+")
_CURRENCY = "[$\u20ac\u00a3\u00a5\u20b9]"
_SIGN = "[-+\u2212]"
_NUMBER = re.compile(
    rf"(?:(?P<sign>{_SIGN})?(?:{_CURRENCY}\s*)?|{_CURRENCY}\s*(?P<inner_sign>{_SIGN}))"
    r"(?P<digits>(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
# Text after a number that would make it another number: 1,23  1.2.3  1e3  1/2  3-4  3 + 4  12:30  5 000  2 1/2
_CONTINUES = re.compile(r"[.,][0-9]|[eE][-+]?[0-9]|[ \t]*+(?:[-+\u2212*/^:=][ \t]*+)?[0-9]")


def extract_answer(text: str) -> Decimal | None:
    """Return the number right after the last `####` that has text after it, or None if it is missing or ambiguous.

    Accepted: a sign, a currency sign, thousands in groups of three, decimals (also ".5"), and any unit after the
    number, with or without a space: "$1,234.50", "-$3", "+7", "12 apples", "50%" (as 50), "5.". The first line with
    text after the mark counts.

    Refused, because taking the first number would be wrong: "1,23" and "0,123" (a decimal comma, or a wrong grouping),
    "1.2.3", "1e3" (GSM8K has no exponents), "1/2", "3-4", "3 + 4", "12:30", "5 000". Words before the number are
    refused too: "#### about 5".
    """
    _, mark, tail = _MARKS_AT_THE_END.sub("", text[::-1], count=1)[::-1].rpartition(_MARK)
    line = tail.lstrip().partition("\n")[0] if mark else ""
    match = _NUMBER.match(line)
    if match is None or _CONTINUES.match(line, match.end()):
        return None
    magnitude = Decimal(match["digits"].replace(",", ""))
    negative = (match["sign"] or match["inner_sign"]) in ("-", "\u2212")
    return magnitude.copy_negate() if negative else magnitude


def gsm8k_reward(response: str, ground_truth: Any) -> float:
    """Return 1.0 if the response's number after `####` equals the ground truth, else 0.0; "1.0" equals "1"."""
    expected = extract_answer(f"{_MARK} {ground_truth}")
    return float(expected is not None and extract_answer(response) == expected)


def gsm8k_strict_reward(response: str, ground_truth: Any) -> float:
    """Return verl's strict score: 1.0 if the last "#### N" is the ground truth, character by character except for
    commas.

    The rule of verl/utils/reward_score/gsm8k.py: one space after the mark, in the last 300 characters; "5." is not "5".
    """
    found = re.findall(rf"{_MARK} (-?[0-9.,]+)", response[-300:])
    return float(bool(found) and found[-1].replace(",", "") == str(ground_truth).replace(",", ""))


def digits_reward(response: str, ground_truth: Any = "") -> float:
    """Return the share of the response's characters that are the digits 0-9; 0.0 for an empty response."""
    return sum(character in "0123456789" for character in response) / len(response) if response else 0.0


REWARDS: dict[str, Score] = {"gsm8k": gsm8k_reward, "gsm8k_strict": gsm8k_strict_reward, "digits": digits_reward}
"""task.reward -> the score of a response, given its row's ground truth."""
HANDED_IN = ("math", "math_strict", "data_source")
"""Values of task.reward that harness/tools/rewards makes, as it makes a user's own."""


def is_reward(name: str) -> bool:
    """Return whether this can be a task.reward: one of the names above, or module:function."""
    module, colon, function = name.rpartition(":")
    return name in (*REWARDS, *HANDED_IN) or bool(module and colon and function.isidentifier())


def load_reward(name: str, rows: Iterable[Row], handed_in: Mapping[str, MakeReward]) -> Reward:
    """Return the reward that task.reward names. Raise ValueError if it cannot score one of the rows."""
    if name in handed_in:
        return handed_in[name](rows)
    if name not in REWARDS:
        raise ValueError(
            f'task.reward = "{name}" is not one of {", ".join(REWARDS)}, and is not in the argument rewards of harness.run.run'
        )
    check_numbers(name, rows)
    score = REWARDS[name]
    return lambda response, row: score(response, row.ground_truth)


def check_numbers(name: str, rows: Iterable[Row]) -> None:
    """Raise ValueError for a row whose ground truth is not a number, if the reward compares numbers."""
    for row in rows if name == "gsm8k" else ():
        if extract_answer(f"{_MARK} {row.ground_truth}") is None:
            raise ValueError(
                f'{row.where} has the ground truth "{row.ground_truth}", but task.reward = "gsm8k" needs a number: an answer'
                ' must end in "#### N"'
            )
