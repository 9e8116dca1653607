import json
import time
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.task.data import Row
from harness.task.rewards import (
    REWARDS,
    digits_reward,
    extract_answer,
    gsm8k_reward,
    gsm8k_strict_reward,
    is_reward,
    load_reward,
)

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 72", "72"),
        ("worked: 3+4=7\n#### 7", "7"),
        ("####7", "7"),
        ("####\n7", "7"),
        ("#### 7\n8 more", "7"),
        ("#### 1\nno, wait\n#### 2", "2"),
        ("#### -3", "-3"),
        ("#### \u22123", "-3"),
        ("#### +7", "7"),
        ("#### 1.0", "1"),
        ("#### .5", "0.5"),
        ("#### 0.50", "0.5"),
        ("#### 5.", "5"),
        ("#### 007", "7"),
        ("#### 1,234", "1234"),
        ("#### 12,345,678.90", "12345678.9"),
        ("#### $1,234.50", "1234.5"),
        ("#### $ 5", "5"),
        ("#### -$3", "-3"),
        ("#### $-3", "-3"),
        ("#### \u20ac12", "12"),
        ("#### 12 apples", "12"),
        ("#### 12apples", "12"),
        ("#### 12 eggs", "12"),
        ("#### 50%", "50"),
        ("#### 30 km/h", "30"),
        ("#### 12, as shown", "12"),
        ("#### 12.<eos>", "12"),
        ("#### 5 ####", "5"),
        ("#### 5\n####\n#### \n", "5"),
    ],
)
def test_reads(text, number):
    assert extract_answer(text) == Decimal(number)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "72",
        "### 72",
        "####",
        "#### ",
        "#### about 5",
        "#### five",
        "#### $",
        "#### -",
        "#### - 3",
        "#### +-3",
        "#### -$-3",
        "#### 1,23",
        "#### 0,123",
        "#### ####",
        "#### 1,2345",
        "#### 1,234,56",
        "#### 1234,567",
        "#### 1.2.3",
        "#### 1.234,56",
        "#### 1e3",
        "#### 1E-3",
        "#### 1/2",
        "#### 2 1/2",
        "#### 3-4",
        "#### 3 + 4",
        "#### 12:30",
        "#### 5 000",
        "#### \u0663",
    ],
)
def test_does_not_read(text):
    assert extract_answer(text) is None


numbers = st.decimals(min_value=-(10**12), max_value=10**12, places=3) | st.integers(-(10**30), 10**30).map(Decimal)
units = st.sampled_from(
    [
        "",
        " ",
        "%",
        " %",
        " apples",
        "kg",
        " m2",
        ".",
        ",",
        ", done",
        "\n9",
        " dollars\n1 2 3",
        "</s>",
    ]
)


@given(
    number=numbers,
    commas=st.booleans(),
    plus=st.booleans(),
    currency=st.sampled_from(["", "$", "$ ", "\u00a3"]),
    unit=units,
)
@example(number=Decimal("-0.001"), commas=True, plus=False, currency="$", unit="%")
def test_any_number_in_any_format_round_trips(number, commas, plus, currency, unit):
    sign = "-" if number < 0 else "+" if plus else ""
    digits = format(number.copy_abs(), ",f" if commas else "f")
    for written in (sign + currency + digits + unit, currency + sign + digits + unit):
        assert extract_answer(f"some 5 words\n#### 4\n#### {written}") == number


@pytest.mark.parametrize("part", ["#", "####", "#### ", "\n", " #", "#### 5 ", "#### $ ", "#### 1,234"])
def test_the_time_grows_with_the_length_alone(part):
    """A response may be one token many thousand times."""

    def seconds(length):
        started = time.process_time()
        for text in (part * length, part * length + "x", "#### 5" + part * length + "x", "#### 5" + " " * length + "x"):
            extract_answer(text)
        return time.process_time() - started

    assert seconds(100_000) < 20 * max(seconds(12_500), 0.005)


@given(st.text(alphabet="# 5\t\nx-+/.,$", max_size=14))
@example("#####")
@example("#### 5 ## ####  ")
def test_only_whole_marks_at_the_end_are_left_out(text):
    plain = text.rstrip()
    while plain.endswith("####"):
        plain = plain.removesuffix("####").rstrip()
    assert extract_answer(text) == extract_answer(plain)
    assert extract_answer(plain) is None or "####" in plain


@given(st.text())
def test_any_text_is_read_or_not_but_never_fails(text):
    assert extract_answer("#### " + text) is None or any(character in "0123456789" for character in text)


@pytest.mark.parametrize(
    ("response", "ground_truth", "score"),
    [
        ("I think\n#### $1,000.00 in all", "1000", 1.0),
        ("#### 1000", "1001", 0.0),
        ("1000", "1000", 0.0),
        ("#### -0", "0", 1.0),
        ("3", "3", 0.0),
        ("3", "three", 0.0),
        ("#### ", "", 0.0),
    ],
)
def test_equal_numbers_score(response, ground_truth, score):
    assert gsm8k_reward(response, ground_truth) == score


@pytest.mark.parametrize(
    ("response", "ground_truth", "score"),
    [
        ("so\n#### 72", "72", 1.0),
        ("#### 1,072", "1072", 1.0),
        ("#### 1072", "1,072", 1.0),
        ("#### -3", "-3", 1.0),
        ("#### 1 #### 2", "2", 1.0),
        ("#### 1 #### 2", "1", 0.0),
        ("####72", "72", 0.0),
        ("#### $72", "72", 0.0),
        ("#### 72.", "72", 0.0),
        ("#### 72.0", "72", 0.0),
        ("72", "72", 0.0),
        ("#### 72" + " " * 293, "72", 1.0),
        ("#### 72" + " " * 294, "72", 0.0),
    ],
)
def test_the_strict_format_is_that_of_verl(response, ground_truth, score):
    """The scores are those of verl 0.7's compute_score, method strict."""
    assert gsm8k_strict_reward(response, ground_truth) == score


@given(st.text())
@example("a1b2")
@example("\u0663\u00b2")
def test_digits_are_a_share(text):
    assert digits_reward("") == 0.0
    assert digits_reward(text) == sum(each in "0123456789" for each in text) / max(1, len(text))


ROW = Row("How many?", "7", "rows.jsonl line 3")


def test_each_name_scores():
    scores = {name: load_reward(name, [ROW], {})("#### 7.0", ROW) for name in REWARDS}
    assert scores == {"gsm8k": 1.0, "gsm8k_strict": 0.0, "digits": 0.25}
    with pytest.raises(
        ValueError, match='rows.jsonl line 3 has the ground truth "seven", but task.reward = "gsm8k" needs a number'
    ):
        load_reward("gsm8k", [replace(ROW, ground_truth="seven")], {})


def test_a_reward_that_is_handed_in_is_made_for_the_rows():
    made = []
    reward = load_reward("mine:length", [ROW], {"mine:length": lambda rows: made.extend(rows) or len})
    assert made == [ROW] and reward is len


@pytest.mark.parametrize("name", ["gsm9k", ":length", "own:", "own:1st", "own"])
def test_what_is_no_reward(name):
    assert not is_reward(name)


@pytest.mark.skipif(
    not GSM8K.is_dir(),
    reason="GSM8K is not beside the repository, in ../shared/data/gsm8k",
)
@pytest.mark.parametrize(("split", "rows"), [("train", 7473), ("test", 1319)])
def test_every_real_answer_is_read(split, rows):
    answers = [
        json.loads(line)["answer"] for line in (GSM8K / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(answers) == rows
    for answer in answers:
        assert str(extract_answer(answer)) == answer.rpartition("#### ")[2].replace(",", "")
