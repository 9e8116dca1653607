"""Values of engine arguments, against the types and choices in this SGLang's source."""

import ast
import difflib
import re
from collections.abc import Mapping
from typing import Any

from harness.rollout.sglang_api import SGLangApi, UnknownEngineArgument, check_arguments
from harness.rollout.sglang_api.probe import engine_argument_annotations

CHOICES = "srt/arg_groups/choices.py"
KINDS = {"str": "a string", "int": "an integer", "float": "a number", "bool": "true or false", "None": ""}


def check_values(api: SGLangApi, user_args: Mapping[str, Any]) -> None:
    """Raise UnknownEngineArgument for an unknown argument, a value of a wrong type and a misspelt choice."""
    check_arguments(api, user_args, {})
    annotations = engine_argument_annotations(api.tree) if user_args else {}
    for name, value in user_args.items():
        if problem := _problem(api, value, annotations[name]):
            shown = f'"{value}"' if isinstance(value, str) else value
            raise UnknownEngineArgument(f"engine.args.{name} = {shown}: sglang {api.version} {problem}.")


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
