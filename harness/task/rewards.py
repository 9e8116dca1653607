"""Rule-based scores of a response: pure functions of text."""

import re
from collections.abc import Callable
from decimal import Decimal

_MARK = "####"
_MARKS_AT_THE_END = re.compile(rf"(?:\s*{_MARK})+\s*$")
_CURRENCY = "[$\u20ac\u00a3\u00a5\u20b9]"
_SIGN = "[-+\u2212]"
_NUMBER = re.compile(
    rf"(?:(?P<sign>{_SIGN})?(?:{_CURRENCY}\s*)?|{_CURRENCY}\s*(?P<inner_sign>{_SIGN}))"
    r"(?P<digits>(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
# What follows a number and would make it another one: 1,23  1.2.3  1e3  1/2  3-4  3 + 4  12:30  5 000  2 1/2
_CONTINUES = re.compile(r"[.,][0-9]|[eE][-+]?[0-9]|[ \t]*[-+\u2212*/^:=]?[ \t]*[0-9]")


def extract_answer(text: str) -> Decimal | None:
    """Return the number right after the last `####` that any text follows; None where it cannot be read in one way only.

    Read: a sign, a currency sign, thousands in groups of three, decimals (".5" too), and any unit behind the
    number, with or without a space: "$1,234.50", "-$3", "+7", "12 apples", "50%" (50, not 0.5), "5.".
    Only the first line with text after the mark counts.

    Not read, since the first number alone would be a wrong answer: "1,23" and "0,123" (a decimal comma, or a slip in the
    grouping), "1.2.3", "1e3" (GSM8K has no exponents, and 1 with unit "e3" would be wrong), "1/2", "3-4",
    "3 + 4", "12:30", "5 000". Nor words before the number: "#### about 5".
    """
    _, mark, tail = _MARKS_AT_THE_END.sub("", text).rpartition(_MARK)
    line = tail.lstrip().partition("\n")[0] if mark else ""
    match = _NUMBER.match(line)
    if match is None or _CONTINUES.match(line, match.end()):
        return None
    magnitude = Decimal(match["digits"].replace(",", ""))
    negative = (match["sign"] or match["inner_sign"]) in ("-", "\u2212")
    return magnitude.copy_negate() if negative else magnitude


def gsm8k_reward(response: str, answer: str) -> float:
    """Return 1.0 if the response's number after `####` equals the answer's, else 0.0; "1.0" equals "1"."""
    expected = extract_answer(answer)
    return float(expected is not None and extract_answer(response) == expected)


def digits_reward(response: str, answer: str = "") -> float:
    """Return the share of the response's characters that are the digits 0-9; 0.0 for an empty response."""
    return sum(character in "0123456789" for character in response) / len(response) if response else 0.0


REWARDS: dict[str, Callable[[str, str], float]] = {"gsm8k": gsm8k_reward, "digits": digits_reward}
"""task.reward -> the score in [0, 1] of a response beside its row's answer."""
