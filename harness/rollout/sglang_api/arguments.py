"""Engine arguments of the user and of the harness, against what this SGLang takes."""

import ast
import difflib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from harness.rollout.sglang_api import source
from harness.rollout.sglang_api.probe import SGLangApi, argument_classes
from harness.rollout.sglang_api.source import SourceTree

CHOICES = "srt/arg_groups/choices.py"
KINDS: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
SHOWN = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


class UnknownEngineArgument(ValueError):
    """The user named an engine argument that this SGLang does not have, or gave it a value that it cannot take."""


def check_arguments(
    api: SGLangApi, user_args: Mapping[str, Any], default_args: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The arguments to build the engine with, and the names of the defaults that this SGLang does not know.

    A user's argument replaces the default of that name. Unknown defaults are dropped: they exist to turn off a feature
    (piecewise CUDA graphs, say) that releases without the argument do not have.

    Raises UnknownEngineArgument for the first unknown user argument, and for a value of a wrong type or a misspelt choice.
    """
    for name in user_args:
        if name not in api.engine_arguments:
            raise UnknownEngineArgument(_unknown(api, name))
    for name, annotation in _annotations(api.tree).items() if user_args else ():
        if name in user_args:
            _check_value(api, name, user_args[name], annotation)
    dropped = tuple(name for name in default_args if name not in api.engine_arguments)
    kept = {name: value for name, value in default_args.items() if name not in dropped}
    return {**kept, **user_args}, dropped


def _unknown(api: SGLangApi, name: str) -> str:
    nearest = difflib.get_close_matches(name, sorted(api.engine_arguments), n=1, cutoff=0.0)
    hint = f"; the nearest it has is {nearest[0]}" if nearest else ""
    return f"engine.args.{name}: sglang {api.version} has no such engine argument{hint}."


def _annotations(tree: SourceTree) -> dict[str, ast.expr]:
    """The annotation of each engine argument."""
    return {
        node.target.id: node.annotation
        for each in argument_classes(tree)
        for node in each.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _check_value(api: SGLangApi, name: str, value: Any, annotation: ast.expr) -> None:
    """annotation: T, or since 0.5.20 A[T, Arg(choices=...)]."""
    kind, choices = annotation, tuple[str, ...]()
    if isinstance(annotation, ast.Subscript) and source.dotted_name(annotation.value) in ("A", "Annotated"):
        assert isinstance(annotation.slice, ast.Tuple)
        kind, choices = annotation.slice.elts[0], tuple(_choices(api.tree, annotation.slice.elts[1:]))
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
    """The plain types that an annotation allows; none where it has any other."""
    if isinstance(node, ast.Constant):  # None, or a forward reference
        if node.value is None:
            return {type(None)}
        with suppress(SyntaxError):
            return _kinds(ast.parse(str(node.value), mode="eval").body)
        return set()
    if isinstance(node, ast.BinOp):
        parts: list[ast.expr] = [node.left, node.right]
    elif isinstance(node, ast.Subscript) and source.dotted_name(node.value).split(".")[-1] in ("Optional", "Union"):
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    else:
        found = KINDS.get(source.dotted_name(node))
        return {float, int} if found is float else {found} if found else set()
    kinds = [_kinds(part) for part in parts]
    return set().union(*kinds) if all(kinds) else set()


def _choices(tree: SourceTree, nodes: list[ast.expr]) -> Iterator[str]:
    """Of Arg(choices=...): a list, or the name of one."""
    for node in nodes:
        for keyword in node.keywords if isinstance(node, ast.Call) else ():
            value: ast.AST | None = keyword.value if keyword.arg == "choices" else None
            if isinstance(value, ast.Name):
                value = _assigned(tree, value.id)
            for each in value.elts if isinstance(value, ast.List | ast.Tuple) else ():
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield each.value


def _assigned(tree: SourceTree, name: str) -> ast.expr | None:
    for node in tree.module(CHOICES).body:
        if isinstance(node, ast.Assign) and any(source.dotted_name(target) == name for target in node.targets):
            return node.value
    return None
