r"""MATH answers, compared as texts after a normalization: the rule of Hendrycks et al. (MATH, 2021), which verl scores by.

It is stricter than math-verify: an answer must be in \boxed{}, and 8/16 is not 1/2.
"""

import re
from typing import Any

REMOVED_FIRST = ("\n", "\\!")
REMOVED = ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")
PERCENT_SIGNS = ("\\\\%", "\\%")
UNIT = "\\text{ "
"""In the answers of MATH, a text that begins with a space is a unit."""
SIMPLE_FRACTION = re.compile(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)")


class NotNormalized(ValueError):
    """The normalization does not know what to do with a text; such texts are compared as they are."""


def math_strict_reward(response: str, ground_truth: Any) -> float:
    r"""Return 1.0 if the response's last \boxed{} holds the ground truth, after both are normalized; otherwise 0.0.

    The rule of verl/utils/reward_score/math_reward.py (0.4 to 0.9). A ground truth that is not a text equals no answer.
    """
    answer = last_boxed(response)
    if answer is None or not isinstance(ground_truth, str):
        return 0.0
    try:
        return float(normalized(answer) == normalized(ground_truth))
    except NotNormalized:
        return float(answer == ground_truth)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{}, or the text from "\boxed " to the next dollar sign; None if there is neither."""
    _, bare, rest = text.rpartition("\\boxed ")
    if bare:
        return rest.partition("$")[0]
    start = text.rfind("\\boxed{")
    if start < 0 or text.rfind("\\boxed") != start:
        return None
    inside = start + len("\\boxed{")
    depth = 1
    for index in range(inside, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if not depth:
            return text[inside:index]
    return None


def normalized(text: str) -> str:
    r"""Return a LaTeX answer without layout and units, with \frac{a}{b} for all ways to write a simple fraction.

    Raise NotNormalized for two units, and for a \frac or \sqrt at the end of the text.
    """
    for part in REMOVED_FIRST:
        text = text.replace(part, "")
    text = text.replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    for part in REMOVED:
        text = text.replace(part, "")
    if text.count(UNIT) > 1:
        raise NotNormalized(text)
    text = text.partition(UNIT)[0]
    for part in PERCENT_SIGNS:
        text = text.replace(part, "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = f"0{text}"
    left, equals, right = text.partition("=")
    if equals and "=" not in right and len(left) <= 2:  # "x = 5"
        text = right
    text = _fractions_with_braces(_roots_with_braces(text).replace(" ", ""))
    if text == "0.5":
        return "\\frac{1}{2}"
    simple = SIMPLE_FRACTION.fullmatch(text)
    return f"\\frac{{{simple[1]}}}{{{simple[2]}}}" if simple else text


def _roots_with_braces(text: str) -> str:
    r"""Write \sqrt3 as \sqrt{3}."""
    first, *rest = text.split("\\sqrt")
    if "" in rest:
        raise NotNormalized(text)
    return first + "".join(f"\\sqrt{part if part[0] == '{' else f'{{{part[0]}}}{part[1:]}'}" for part in rest)


def _fractions_with_braces(text: str) -> str:
    r"""Write \frac12 and \frac1{2} as \frac{1}{2}. A text in which a \frac has one character only stays as it is."""
    written, *rest = text.split("\\frac")
    for part in rest:
        if not part:
            raise NotNormalized(text)
        if part[0] == "{":
            written += f"\\frac{part}"
        elif len(part) < 2:
            return text
        else:
            below = part[1:] if part[1] == "{" else f"{{{part[1]}}}{part[2:]}"
            written += f"\\frac{{{part[0]}}}{below}"
    return written
