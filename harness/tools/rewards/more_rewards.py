"""What task.reward names beside the rules of task/rewards.py: math, data_source, and a user's own module:function."""

import ast
import importlib.util
import inspect
import math
import numbers
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from harness.runtime.observer import Observer, RunContext
from harness.task.data import Row
from harness.task.rewards import HANDED_IN, REWARDS, Reward, Score, check_numbers
from harness.tools.rewards.math_answers import MathWorker

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


class RewardMaker(Observer):
    """Hand the run the reward that task.reward names, where it is none of the reference's."""

    def met(self, run: RunContext) -> None:
        name = run.config.task.reward
        if name not in REWARDS:
            run.rewards[name] = lambda rows: make_reward(name, rows)


def make_reward(name: str, rows: Iterable[Row]) -> Reward:
    """Return the reward of these rows, importing a user's own. Raise ValueError, one sentence, where it cannot be."""
    rows = list(rows)
    check_reward(name, rows)
    check_math_verify(name, rows)
    if name not in HANDED_IN:
        function = _import_own(name)
        return lambda response, row: _call_own(function, name, response, row)
    scores: dict[str, Score] = {**REWARDS, "math": MathWorker().reward}
    if name == "math":
        return lambda response, row: scores["math"](response, row.ground_truth)
    return lambda response, row: scores[DATA_SOURCES[row.data_source]](response, row.ground_truth)


def check_reward(name: str, rows: Iterable[Row]) -> None:
    """Raise ValueError, one sentence, for a reward that is not there, or that cannot score one of the rows. Import nothing."""
    if name not in (*REWARDS, *HANDED_IN):
        _check_own(name)
    check_numbers(name, rows)
    for row in rows if name == "data_source" else ():
        if row.data_source not in DATA_SOURCES:
            raise ValueError(
                f'{row.where} has data_source "{row.data_source}", and task.reward = "{name}" scores'
                f" {', '.join(DATA_SOURCES)}: name a reward, or your own as module:function"
            )


def check_math_verify(name: str, rows: Iterable[Row]) -> None:
    """Raise ValueError where a reward needs math-verify and it is not installed here."""
    used = {DATA_SOURCES.get(row.data_source) for row in rows} if name == "data_source" else {name}
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
