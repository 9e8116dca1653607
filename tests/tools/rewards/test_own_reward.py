"""What the source of a user's reward tells, without running it."""

from pathlib import Path

import pytest

from harness.tools.rewards.own_reward import check_own

RIGHT = """
from functools import partial
from elsewhere import imported

def fits(data_source, solution_str, ground_truth, extra_info=None): return 1.0
def takes_all(**given): return 1.0
def more(solution_str, ground_truth, *, data_source, extra_info, weight=2): return 1.0
alias = fits
short = lambda data_source, solution_str, ground_truth, extra_info: 1.0
made = partial(fits, extra_info=None)
@made
def decorated(anything): return 1.0
if made:
    def of_a_branch(anything): return 1.0
try:
    chosen = 3
except ValueError:
    chosen = fits
raise RuntimeError("this file was run")
"""
WRONG = {
    "def f(response, row): return 1.0": ":1: f needs response, row, which no reward is given",
    "def f(solution_str, ground_truth): return 1.0": ":1: f does not take data_source, extra_info",
    "def f(*given): return 1.0": "does not take data_source, solution_str",
    "def f(solution_str, /, **given): return 1.0": "needs solution_str",
    "import x\n\nf = 3": ":3: f is a value, and must be a function",
    "class f: ...": "f is a class, and must be a function",
    "async def f(**given): return 1.0": "f is async",
    "def g(a): ...\nf = g": ":1: g needs a",
    "f = lambda response: 1.0": "f needs response",
    "# f is not here\n": "has no function f",
    "def f(:\n": ":1 is not valid Python",
    "x = 1\nwhile\n": ":2 is not valid Python",
}


@pytest.mark.parametrize(
    "name", ["fits", "takes_all", "more", "alias", "short", "made", "decorated", "of_a_branch", "chosen", "imported"]
)
def test_what_may_be_called_passes(name: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(RIGHT)
    check_own(f"{tmp_path}/own.py:{name}")


@pytest.mark.parametrize("text", WRONG)
def test_what_cannot_be_called_is_named_with_its_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(ValueError) as caught:
        check_own(f"{tmp_path}/own.py:f")
    assert f"{tmp_path}/own.py" in str(caught.value) and WRONG[text] in str(caught.value)


def test_a_module_is_read_where_python_would_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "some_rewards").mkdir()
    (tmp_path / "some_rewards" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "some_rewards" / "inner.py").write_text("def f(response): return 1.0")
    with pytest.raises(ValueError, match="inner.py:1: f needs response"):
        check_own("some_rewards.inner:f")
    check_own("some_rewards.made_on_import:f")
