"""Engine arguments of the user and of the harness, against what this SGLang takes."""

import ast
import difflib
import re
from collections.abc import Mapping
from typing import Any

from harness.rollout.sglang_api.probe import SGLangApi, engine_argument_annotations

CHOICES = "srt/arg_groups/choices.py"
KINDS = {"str": "a string", "int": "an integer", "float": "a number", "bool": "true or false", "None": ""}


class UnknownEngineArgument(ValueError):
    """The user named an engine argument that this SGLang does not have, or gave it a value that it cannot take."""


def check_arguments(
    api: SGLangApi, user_args: Mapping[str, Any], default_args: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the arguments to build the engine with, and the names of the defaults that this SGLang does not have.

    A user's argument replaces the default of that name. Unknown defaults are dropped: they turn off a feature that
    releases without the argument do not have. Raises UnknownEngineArgument for an unknown argument of the user, a value
    of a wrong type and a misspelt choice.
    """
    annotations = engine_argument_annotations(api.tree) if user_args else {}
    for name, value in user_args.items():
        if name not in api.engine_arguments:
            nearest = difflib.get_close_matches(name, sorted(api.engine_arguments), n=1, cutoff=0.0)
            hint = f"; the nearest it has is {nearest[0]}" if nearest else ""
            raise UnknownEngineArgument(f"engine.args.{name}: sglang {api.version} has no such engine argument{hint}.")
        if problem := _problem(api, value, annotations[name]):
            shown = f'"{value}"' if isinstance(value, str) else value
            raise UnknownEngineArgument(f"engine.args.{name} = {shown}: sglang {api.version} {problem}.")
    dropped = tuple(name for name in default_args if name not in api.engine_arguments)
    kept = {name: value for name, value in default_args.items() if name not in dropped}
    return {**kept, **user_args}, dropped


def _problem(api: SGLangApi, value: Any, annotation: ast.expr) -> str:
    """Return why an argument cannot have this value, as the end of a sentence; "" where it can.

    annotation: T, or since 0.5.20 A[T, Arg(choices=...)]. Only plain types are checked, and plugins may add choices: only
    what looks like a misspelt one is refused.
    """
    kind, details = annotation, list[ast.expr]()
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("A", "Annotated"):
        assert isinstance(annotation.slice, ast.Tuple)
        kind, *details = annotation.slice.elts
    kinds = [word for word in re.findall(r"\w+", ast.unparse(kind)) if word not in ("typing", "Optional", "Union")]
    fits = value is None or type(value).__name__ in kinds or ("float" in kinds and type(value) is int)
    if not fits and set(kinds) <= KINDS.keys():
        return "takes " + " or ".join(KINDS[each] for each in kinds if each != "None") + " there"
    choices = _choices(api, details)
    nearest = difflib.get_close_matches(value, choices, n=1, cutoff=0.7) if isinstance(value, str) else []
    return f"has no such choice; the nearest is {nearest[0]}" if nearest and value not in choices else ""


def _choices(api: SGLangApi, details: list[ast.expr]) -> list[str]:
    """Return the choices of Arg(choices=...): a list, or the name of one."""
    given = [
        key.value for each in details if isinstance(each, ast.Call) for key in each.keywords if key.arg == "choices"
    ]
    lists = [api.tree.assigned(CHOICES).get(ast.unparse(each), each) for each in given]
    constants = [node for each in lists for node in ast.walk(each) if isinstance(node, ast.Constant)]
    return [node.value for node in constants if isinstance(node.value, str)]
