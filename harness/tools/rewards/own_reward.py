"""Check a user's own reward, MODULE:FUNCTION or FILE.py:FUNCTION, in its source: no code of the user runs.

What the source alone does not tell, such as a function that is made by a call or imported, is left to the import.
"""

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""With these keyword arguments a reward is called, as verl calls it."""
NO_FUNCTIONS = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.ListComp, ast.DictComp)
"""Expressions whose value is never a function."""


def is_of_module(name: str) -> bool:
    """Return whether a user's reward is MODULE:FUNCTION, which depends on the Python that imports it."""
    module, colon, _ = name.rpartition(":")
    return bool(colon) and not module.endswith(".py")


def check_own(name: str) -> None:
    """Raise ValueError if the file or package is missing, or if its source shows that the function cannot be called."""
    module, _, function = name.rpartition(":")
    file = _file_of_module(name, module) if is_of_module(name) else Path(module).expanduser()
    if file is None:
        return
    if not file.is_file():
        raise ValueError(f'task.reward = "{name}" cannot work: there is no file {file}')
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f'task.reward = "{name}" cannot work: {file}{line} is not valid Python: {what}') from error
    if why := _why_not(tree.body, function):
        raise ValueError(f'task.reward = "{name}" cannot work: {file}{why}')


def _file_of_module(name: str, module: str) -> Path | None:
    """Return the source of a module, or None if it has none that is found without running its packages.

    Raise ValueError if Python does not find its package.
    """
    package, *inner = module.split(".")
    spec = importlib.util.find_spec(package) if package else None
    if spec is None:
        hint = "put its folder on PYTHONPATH, or give FILE.py:FUNCTION"
        raise ValueError(f'task.reward = "{name}" cannot work: Python does not find {package}; {hint}')
    for number, _ in enumerate(inner, 2):
        inside = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(".".join(module.split(".")[:number]), list(inside)) if inside else None
    found = spec.origin if spec and spec.has_location else None
    return Path(found) if found and found.endswith(".py") else None


def _why_not(body: Sequence[ast.stmt], name: str) -> str:
    """Return why a module's function cannot be called as rewards are, beginning with where it is; "" if it may be."""
    bound = [(line, value) for each, line, value in _bindings(body) if each in (name, "*")]
    if not bound:
        return f" has no function {name}"
    line, value = bound[-1]
    if isinstance(value, ast.Name) and value.id != name:
        return _why_not(body, value.id) if any(each == value.id for each, _, _ in _bindings(body)) else ""
    where = f":{line}: {name}"
    if isinstance(value, (ast.ClassDef, *NO_FUNCTIONS)):
        return f"{where} is {'a class' if isinstance(value, ast.ClassDef) else 'a value'}, and must be a function"
    if isinstance(value, ast.AsyncFunctionDef):
        return f"{where} is async, and must be a plain function"
    if isinstance(value, ast.FunctionDef | ast.Lambda) and (why := _wrong_parameters(value)):
        return f"{where} {why}; it is called with {', '.join(f'{each}=' for each in PARAMETERS)}"
    return ""


def _wrong_parameters(function: ast.FunctionDef | ast.Lambda) -> str:
    """Return why a function cannot be called with PARAMETERS, or "" if it can.

    A decorator may change the signature, so a decorated function is not judged.
    """
    if isinstance(function, ast.FunctionDef) and function.decorator_list:
        return ""
    given = function.args
    by_position = [*given.posonlyargs, *given.args]
    optional = {each.arg for each in by_position[len(by_position) - len(given.defaults) :]}
    optional |= {each.arg for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default}
    by_name = [each.arg for each in (*given.args, *given.kwonlyargs)]
    positional = [each.arg for each in given.posonlyargs if each.arg not in optional]
    needed = [*positional, *(each for each in by_name if each not in optional and each not in PARAMETERS)]
    if needed:
        return f"needs {', '.join(needed)}, which no reward is given"
    refused = [each for each in PARAMETERS if each not in by_name] if given.kwarg is None else []
    return f"does not take {', '.join(refused)}" if refused else ""


def _bindings(body: Sequence[ast.stmt]) -> Iterator[tuple[str, int, ast.AST | None]]:
    """Yield each name that a module binds, its line, and what it is bound to: None if the source does not tell."""
    for each in body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield each.name, each.lineno, each
        elif isinstance(each, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0], each.lineno, None) for alias in each.names)
        elif isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None:
            for target in each.targets if isinstance(each, ast.Assign) else [each.target]:
                plain = isinstance(target, ast.Name)
                names = (node.id for node in ast.walk(target) if isinstance(node, ast.Name))
                yield from ((name, each.lineno, each.value if plain else None) for name in names)
        else:  # of a condition, a loop, or another statement, nobody knows which part runs
            yield from ((name, each.lineno, None) for name in _bound_within(each))


def _bound_within(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
