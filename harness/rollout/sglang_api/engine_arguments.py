"""Engine arguments of the user and of the harness, against what this SGLang takes."""

import ast
import difflib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from harness.rollout.sglang_api import source
from harness.rollout.sglang_api.probe import SGLangApi, argument_classes
from harness.rollout.sglang_api.source import SourceTree

CHOICES = "srt/arg_groups/choices.py"
KINDS: dict[str, set[type]] = {"str": {str}, "int": {int}, "float": {float, int}, "bool": {bool}}
SHOWN = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


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
    for name in user_args:
        if name not in api.engine_arguments:
            nearest = difflib.get_close_matches(name, sorted(api.engine_arguments), n=1, cutoff=0.0)
            hint = f"; the nearest it has is {nearest[0]}" if nearest else ""
            raise UnknownEngineArgument(f"engine.args.{name}: sglang {api.version} has no such engine argument{hint}.")
    for each in argument_classes(api.tree) if user_args else ():
        for name, annotation in source.annotations(each).items():
            if name in user_args:
                _check_value(api, name, user_args[name], annotation)
    dropped = tuple(name for name in default_args if name not in api.engine_arguments)
    kept = {name: value for name, value in default_args.items() if name not in dropped}
    return {**kept, **user_args}, dropped


def _check_value(api: SGLangApi, name: str, value: Any, annotation: ast.expr) -> None:
    """annotation: T, or since 0.5.20 A[T, Arg(choices=...)]."""
    kind, choices = annotation, list[str]()
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("A", "Annotated"):
        assert isinstance(annotation.slice, ast.Tuple)
        kind, choices = annotation.slice.elts[0], _choices(api.tree, annotation.slice.elts[1:])
    kinds = _kinds(kind)
    shown = f'"{value}"' if isinstance(value, str) else value
    if kinds and value is not None and type(value) not in kinds:
        takes = " or ".join(SHOWN[each] for each in kinds if each in SHOWN and not (each is int and float in kinds))
        raise UnknownEngineArgument(f"engine.args.{name} = {shown}: sglang {api.version} takes {takes} there.")
    # Plugins may add choices: only what looks like a misspelt one is refused.
    nearest = difflib.get_close_matches(value, choices, n=1, cutoff=0.7) if isinstance(value, str) else []
    if nearest and value not in choices:
        raise UnknownEngineArgument(
            f"engine.args.{name} = {shown}: sglang {api.version} has no such choice; the nearest is {nearest[0]}."
        )


def _kinds(node: ast.expr) -> set[type]:
    """Return the plain types that an annotation allows; none where it has any other."""
    match node:
        case ast.Constant(value=None):
            return {type(None)}
        case ast.Constant():  # a forward reference
            with suppress(SyntaxError):
                return _kinds(ast.parse(str(node.value), mode="eval").body)
            return set()
        case ast.BinOp(left=left, right=right):
            parts = [left, right]
        case ast.Subscript(value=outer) if ast.unparse(outer).split(".")[-1] in ("Optional", "Union"):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        case _:
            return KINDS.get(ast.unparse(node), set())
    kinds = [_kinds(part) for part in parts]
    return set().union(*kinds) if all(kinds) else set()


def _choices(tree: SourceTree, nodes: list[ast.expr]) -> list[str]:
    """Return the choices of Arg(choices=...): a list, or the name of one."""
    calls = (node for node in nodes if isinstance(node, ast.Call))
    value: ast.expr | None = next((k.value for call in calls for k in call.keywords if k.arg == "choices"), None)
    if isinstance(value, ast.Name):
        assigned = [node for node in tree.module(CHOICES).body if isinstance(node, ast.Assign)]
        value = next((node.value for node in assigned if value.id in map(ast.unparse, node.targets)), None)
    elements = value.elts if isinstance(value, ast.List | ast.Tuple) else []
    return [e.value for e in elements if isinstance(e, ast.Constant) and isinstance(e.value, str)]
