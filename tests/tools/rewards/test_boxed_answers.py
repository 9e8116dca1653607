"""MATH's answers as verl scores them. The scores are those of verl 0.9's math_reward.py for the same texts."""

import pytest

from harness.tools.rewards.boxed_answers import math_strict_reward

HALF = r"\frac{1}{2}"


@pytest.mark.parametrize(
    ("response", "ground_truth", "score"),
    [
        (r"so \boxed{4}", "4", 1.0),
        ("The answer is 4", "4", 0.0),
        (r"\boxed{8/16}", HALF, 0.0),
        (r"1 + 1 = 2 and 2 * 2 = 4", "4", 0.0),
        (r"\boxed{3} no, \boxed{4}", "4", 1.0),
        (r"\boxed{4} no, \boxed{3}", "4", 0.0),
        (r"\boxed{1/2}", HALF, 1.0),
        (r"\boxed{\dfrac12}", HALF, 1.0),
        (r"\boxed{\tfrac1{2}}", HALF, 1.0),
        (r"\boxed{0.5}", HALF, 1.0),
        (r"\boxed{.25}", "0.25", 1.0),
        (r"\boxed{x = 5}", "5", 1.0),
        (r"\boxed{long = 5}", "5", 0.0),
        (r"\boxed{\sqrt2}", r"\sqrt{2}", 1.0),
        (r"\boxed{12 \text{ cm}}", "12", 1.0),
        (r"\boxed{12 \text{ cm} 3 \text{ cm}}", "12", 0.0),
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{90^\circ}", "90", 1.0),
        (r"\boxed{\left( 1, 2 \right)}", "(1,2)", 1.0),
        (r"$\boxed 7$ is it", "7", 1.0),
        (r"\fbox{7}", "7", 0.0),
        (r"\boxed{\frac{1}{2}", HALF, 0.0),
        (r"\boxed{}", "", 1.0),
        (r"\boxed{\frac}", r"\frac", 1.0),
        (r"\boxed{4}", 4, 0.0),
    ],
)
def test_scores_are_verls(response: str, ground_truth: object, score: float) -> None:
    assert math_strict_reward(response, ground_truth) == score
