"""Rule-based scores of a response, in [0, 1], and a user's own. Imports the standard library only."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
import numbers
import re
import sys
from collections.abc import Callable, Iterable
from decimal import Decimal
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.task.math_answers import MathWorker

if TYPE_CHECKING:
    from harness.task.data import Row

Score = Callable[[str, Any], float]
"""(response, ground truth) -> score in [0, 1]."""
Reward = Callable[[str, "Row"], float]
"""(response, row) -> score."""

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


def gsm8k_reward(response: str, ground_truth: Any) -> float:
    """Return 1.0 if the response's number after `####` equals the ground truth, else 0.0; "1.0" equals "1"."""
    expected = extract_answer(f"{_MARK} {ground_truth}")
    return float(expected is not None and extract_answer(response) == expected)


def gsm8k_strict_reward(response: str, ground_truth: Any) -> float:
    """Return verl's strict score: 1.0 if the last "#### N" is the ground truth, letter by letter but for commas, else 0.0.

    As verl/utils/reward_score/gsm8k.py: one space after the mark, within the last 300 characters; "5." is not "5".
    """
    found = re.findall(rf"{_MARK} (-?[0-9.,]+)", response[-300:])
    return float(bool(found) and found[-1].replace(",", "") == str(ground_truth).replace(",", ""))


def digits_reward(response: str, ground_truth: Any = "") -> float:
    """Return the share of the response's characters that are the digits 0-9; 0.0 for an empty response."""
    return sum(character in "0123456789" for character in response) / len(response) if response else 0.0


REWARDS: dict[str, Callable[[], Score]] = {
    "gsm8k": lambda: gsm8k_reward,
    "gsm8k_strict": lambda: gsm8k_strict_reward,
    "math": lambda: MathWorker().reward,
    "digits": lambda: digits_reward,
}
"""task.reward -> what makes the score of a response beside its row's ground truth."""
BY_DATA_SOURCE = "data_source"
DATA_SOURCES = {
    "openai/gsm8k": "gsm8k_strict",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
}
"""A row's data_source -> its reward, as in verl's default_compute_score, which has more of them, and compares MATH's answers
as texts (math-verify reads more of the right ones)."""


class RewardFailed(RuntimeError):
    """A user's reward raised, or returned no number."""


def is_reward(name: str) -> bool:
    """Whether it may be a task.reward: a name from here, or module:function."""
    module, colon, function = name.rpartition(":")
    return name in REWARDS or name == BY_DATA_SOURCE or bool(module and colon and function.isidentifier())


def load_reward(name: str) -> Reward:
    """Return the reward that task.reward names, importing a user's own. Raise ValueError where it cannot be."""
    if name in REWARDS:
        score = REWARDS[name]()
        return lambda response, row: score(response, row.ground_truth)
    if name == BY_DATA_SOURCE:
        scores = {each: REWARDS[each]() for each in DATA_SOURCES.values()}
        return lambda response, row: scores[DATA_SOURCES[row.data_source]](response, row.ground_truth)
    function = _import_own(name)
    return lambda response, row: _call_own(function, name, response, row)


def check_reward(name: str, rows: Iterable[Row]) -> None:
    """Raise ValueError, one sentence, for a reward that is not there, or that cannot score one of the rows. Import nothing."""
    if name not in REWARDS and name != BY_DATA_SOURCE:
        _check_own(name)
    for row in rows:
        if name == "gsm8k" and extract_answer(f"{_MARK} {row.ground_truth}") is None:
            raise ValueError(
                f'{row.where} has the ground truth "{row.ground_truth}", which is no number, as task.reward = "gsm8k" needs: an'
                ' answer must end in "#### N"'
            )
        if name == BY_DATA_SOURCE and row.data_source not in DATA_SOURCES:
            raise ValueError(
                f'{row.where} has data_source "{row.data_source}", and task.reward = "{name}" scores'
                f" {', '.join(DATA_SOURCES)}: name a reward, or your own as module:function"
            )


def check_math_verify(name: str, rows: Iterable[Row]) -> None:
    """Raise ValueError where a reward needs math-verify and it is not installed here."""
    used = {DATA_SOURCES.get(row.data_source) for row in rows} if name == BY_DATA_SOURCE else {name}
    if "math" in used and importlib.util.find_spec("math_verify") is None:
        install = f"{sys.executable} -m pip install math-verify"
        raise ValueError(
            f'task.reward = "{name}" compares MATH answers with math-verify, which is not installed: {install}'
        )


def _source_of(module: str) -> Path | None:
    """Return the .py of a module, by path or by dotted name, without importing its packages; None where it is not there."""
    if module.endswith(".py"):
        file = Path(module).expanduser()
        return file if file.is_file() else None
    spec, path, name = None, None, ""
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return Path(spec.origin) if spec and spec.origin else None


def _check_own(name: str) -> None:
    module, _, function = name.rpartition(":")
    file = _source_of(module)
    if file is None:
        kind = (
            "file"
            if module.endswith(".py")
            else "module that Python finds; put its folder on PYTHONPATH, or give FILE.py"
        )
        raise ValueError(f'task.reward = "{name}" cannot work: {module} is no {kind}')
    if file.suffix != ".py":
        return  # compiled: what it has shows once it is imported
    try:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f'task.reward = "{name}" cannot work: {file} is not Python: {error}') from error
    names = {each.name for each in nodes if isinstance(each, ast.FunctionDef | ast.ClassDef)}
    names |= {each.asname or each.name for each in nodes if isinstance(each, ast.alias)}
    names |= {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    if not names & {function, "*"}:
        raise ValueError(f'task.reward = "{name}" cannot work: {file} has no function {function}')


def _import_own(name: str) -> Callable[..., Any]:
    module, _, function = name.rpartition(":")
    try:
        if module.endswith(".py"):
            spec = importlib.util.spec_from_file_location("task_reward", Path(module).expanduser())
            assert spec and spec.loader
            loaded = sys.modules["task_reward"] = importlib.util.module_from_spec(spec)  # where dataclasses look
            spec.loader.exec_module(loaded)
        else:
            loaded = importlib.import_module(module)
        found: Callable[..., Any] = getattr(loaded, function)
    except Exception as error:  # whatever a user's module raises
        raise ValueError(f'task.reward = "{name}" cannot be imported: {type(error).__name__}: {error}') from error
    if not callable(found) or inspect.iscoroutinefunction(found):
        raise ValueError(f'task.reward = "{name}" must be a plain function, got a {type(found).__name__}')
    return found


def _call_own(function: Callable[..., Any], name: str, response: str, row: Row) -> float:
    """Call it with the keyword arguments of verl's rewards; of a table it returns, the score counts, as there."""
    try:
        score = function(
            data_source=row.data_source,
            solution_str=response,
            ground_truth=row.ground_truth,
            extra_info=row.extra_info,
        )
    except Exception as error:
        raise RewardFailed(f'task.reward = "{name}" raised {type(error).__name__}: {error}, for {row.where}') from error
    value = score.get("score") if isinstance(score, dict) else score
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise RewardFailed(
            f'task.reward = "{name}" must return a finite number, and for {row.where} returned {score!r}'
        )
    return float(value)
