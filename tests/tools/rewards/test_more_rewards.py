"""Rewards that are handed in: by a row's data source, and a user's own."""

from dataclasses import replace

import pytest

from harness.task.data import Row
from harness.task.rewards import HANDED_IN, REWARDS
from harness.tools.rewards.more_rewards import (
    DATA_SOURCES,
    RewardFailed,
    check_math_verify,
    check_reward,
    make_reward,
)

ROW = Row("How many?", "7", "rows.jsonl line 3", "openai/gsm8k", {"index": 2})


def test_a_data_source_picks():
    assert [make_reward("data_source", [ROW])(text, ROW) for text in ("#### 7.0", "#### 7")] == [0.0, 1.0]
    assert set(DATA_SOURCES.values()) <= {*REWARDS, *HANDED_IN}
    row = replace(ROW, data_source="lighteval/MATH", ground_truth="\\frac{1}{2}")
    assert make_reward("data_source", [row])("so \\boxed{1/2}", row) == 1.0


def test_rows_that_can_be_scored_pass_and_another_data_source_is_named():
    check_reward("gsm8k", [ROW])
    check_reward("data_source", [ROW])
    with pytest.raises(ValueError, match=r'rows.jsonl line 3 has data_source "geo3k", .* can score openai/gsm8k'):
        check_reward("data_source", [ROW, replace(ROW, data_source="geo3k")])


OWN = """
import dataclasses, numpy
@dataclasses.dataclass
class Length:
    value: int
def length(data_source, solution_str, ground_truth, extra_info):
    return Length(len(solution_str)).value + extra_info["index"] / 10 + (data_source == "openai/gsm8k")
def table(**keywords):
    return {"score": numpy.float32(0.5), "of": sorted(keywords)}
def raises(**_):
    raise KeyError("no such thing")
def text(**_):
    return "good"
def undefined(**_):
    return float("nan")
def other(response, row):
    return 1.0
async def later(**_):
    return 1.0
constant = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's file, and the same as a module of a package."""
    (tmp_path / "some_package").mkdir()
    (tmp_path / "some_package" / "__init__.py").write_text("raise RuntimeError('imported')")
    for file in ("own.py", "own_reward_module.py", "some_package/inner.py"):
        (tmp_path / file).write_text(OWN)
    (tmp_path / "broken.py").write_text("def length(")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_an_own_reward_is_called_as_verl_calls_it(own):
    for name in (f"{own}/own.py", "own_reward_module"):
        check_reward(f"{name}:length", [ROW])
        assert make_reward(f"{name}:length", [])("abc", ROW) == 4.2
        assert make_reward(f"{name}:table", [])("abc", ROW) == 0.5


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", "raised KeyError: 'no such thing', for rows.jsonl line 3"),
        ("text", "must return a finite number, and for rows.jsonl line 3 returned 'good'"),
        ("undefined", "must return a finite number, and for rows.jsonl line 3 returned nan"),
    ],
)
def test_an_own_reward_that_fails_is_named_with_the_row(own, function, message):
    with pytest.raises(RewardFailed, match=rf'task.reward = ".*/own.py:{function}" {message}'):
        make_reward(f"{own}/own.py:{function}", [])("abc", ROW)


def test_an_own_reward_that_cannot_be_called_is_named(own):
    for name, message in (
        (f"{own}/own.py:width", "cannot be imported: AttributeError: .* has no attribute 'width'"),
        ("no_such_module_here:length", "cannot be imported: ModuleNotFoundError: No module named"),
        ("some_package.inner:length", "cannot be imported: RuntimeError: imported"),
        (f"{own}/broken.py:length", r"cannot be imported: SyntaxError: '\(' was never closed \(broken.py, line 1\)"),
        (f"{own}/own.py:constant", "must be a plain function, got a int"),
        (f"{own}/own.py:later", "must be a plain function"),
        (f"{own}/own.py:other", "is called with data_source=, .* and does not take that: missing a required argument"),
    ):
        with pytest.raises(ValueError, match=message):
            make_reward(name, [])


def test_math_needs_math_verify(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    check_math_verify("data_source")
    with pytest.raises(ValueError, match='task.reward = "math" .* is not installed: .*pip install math-verify'):
        check_math_verify("math")
