"""Rewards that need more than task/rewards.py: for MATH, data_source, and a user's own function."""

import importlib.util
import inspect
import math
import numbers
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from harness.config.schema import Config
from harness.task.data import Row
from harness.task.rewards import HANDED_IN, REWARDS, MakeReward, Reward, Score, check_numbers
from harness.tools.rewards.boxed_answers import math_strict_reward
from harness.tools.rewards.math_answers import MathWorker

DATA_SOURCES = {
    "openai/gsm8k": "gsm8k_strict",
    "lighteval/MATH": "math_strict",
    "DigitalLearningGmbH/MATH-lighteval": "math_strict",
    "HuggingFaceH4/MATH-500": "math_strict",
}
"""A row's data_source -> its reward, as in verl's default_compute_score, which knows more sources."""

PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""With these keyword arguments a user's reward is called, as verl calls it."""


class RewardFailed(RuntimeError):
    """A user's reward raised an error, or did not return a number."""


def rewards_of(config: Config) -> dict[str, MakeReward]:
    """Return the argument `rewards` of harness.run.run for a config: empty if task.reward is one of task/rewards.py."""
    name = config.task.reward
    return {} if name in REWARDS else {name: lambda rows: make_reward(name, rows)}


def make_reward(name: str, rows: Iterable[Row]) -> Reward:
    """Return the reward for these rows; a user's own is imported. Raise ValueError if it cannot score them."""
    rows = list(rows)
    check_reward(name, rows)
    check_math_verify(name)
    if name not in HANDED_IN:
        function = _import_own(name)
        return lambda response, row: _call_own(function, name, response, row)
    scores: dict[str, Score] = {**REWARDS, "math": MathWorker().reward, "math_strict": math_strict_reward}
    if name != "data_source":
        return lambda response, row: scores[name](response, row.ground_truth)
    return lambda response, row: scores[DATA_SOURCES[row.data_source]](response, row.ground_truth)


def check_reward(name: str, rows: Iterable[Row]) -> None:
    """Raise ValueError for a reward that does not exist, or that cannot score one of the rows.

    Do not import a user's own: of its file only a missing one is told.
    """
    file = name.rpartition(":")[0]
    if file.endswith(".py") and not Path(file).expanduser().is_file():
        raise ValueError(f'task.reward = "{name}" cannot work: there is no file {file}')
    check_numbers(name, rows)
    for row in rows if name == "data_source" else ():
        if row.data_source not in DATA_SOURCES:
            raise ValueError(
                f'{row.where} has data_source "{row.data_source}", but task.reward = "{name}" can score'
                f" {', '.join(DATA_SOURCES)}; name a reward, or your own as module:function"
            )


def check_math_verify(name: str) -> None:
    """Raise ValueError if the reward needs math-verify and it is not installed."""
    if name == "math" and importlib.util.find_spec("math_verify") is None:
        install = f"{sys.executable} -m pip install math-verify"
        raise ValueError(
            f'task.reward = "{name}" compares MATH answers with math-verify, which is not installed: {install}'
        )


def _import_own(name: str) -> Callable[..., Any]:
    """Return the user's function. Raise ValueError if it cannot be imported, or cannot be called as verl calls it."""
    module, _, function = name.rpartition(":")
    try:
        if module.endswith(".py"):
            spec = importlib.util.spec_from_file_location("task_reward", Path(module).expanduser())
            assert spec and spec.loader
            loaded = sys.modules["task_reward"] = importlib.util.module_from_spec(
                spec
            )  # dataclasses look for their module there
            spec.loader.exec_module(loaded)
        else:
            loaded = importlib.import_module(module)
        found: Callable[..., Any] = getattr(loaded, function)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(f'task.reward = "{name}" cannot be imported: {type(error).__name__}: {error}') from error
    if not callable(found) or inspect.isclass(found) or inspect.iscoroutinefunction(found):
        raise ValueError(f'task.reward = "{name}" must be a plain function, got a {type(found).__name__}')
    try:
        inspect.signature(found).bind(**dict.fromkeys(PARAMETERS))
    except TypeError as error:
        called = ", ".join(f"{each}=" for each in PARAMETERS)
        raise ValueError(f'task.reward = "{name}" is called with {called}, and does not take that: {error}') from error
    return found


def _call_own(function: Callable[..., Any], name: str, response: str, row: Row) -> float:
    """Return the score of a user's function, called as verl calls it. If it returns a dict, its "score" counts.

    Raise RewardFailed if it raises, or does not return a finite number.
    """
    try:
        given = row.data_source, response, row.ground_truth, row.extra_info
        score = function(**dict(zip(PARAMETERS, given, strict=True)))
    except Exception as error:
        raise RewardFailed(f'task.reward = "{name}" raised {type(error).__name__}: {error}, for {row.where}') from error
    value = score.get("score") if isinstance(score, dict) else score
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise RewardFailed(
            f'task.reward = "{name}" must return a finite number, and for {row.where} returned {score!r}'
        )
    return float(value)
