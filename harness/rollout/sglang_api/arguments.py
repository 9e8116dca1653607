"""Engine arguments of the user and of the harness, against what this SGLang takes."""

import difflib
from collections.abc import Mapping
from typing import Any

from harness.rollout.sglang_api.probe import SGLangApi


class UnknownEngineArgument(ValueError):
    """The user named an engine argument that this SGLang does not have."""


def check_arguments(
    api: SGLangApi, user_args: Mapping[str, Any], default_args: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The arguments to build the engine with, and the names of the defaults that this SGLang does not know.

    A user's argument replaces the default of that name. Unknown defaults are dropped: they exist to turn off a feature
    (piecewise CUDA graphs, say) that releases without the argument do not have.

    Raises UnknownEngineArgument for the first unknown user argument.
    """
    for name in user_args:
        if name not in api.engine_arguments:
            raise UnknownEngineArgument(_unknown(api, name))
    dropped = tuple(name for name in default_args if name not in api.engine_arguments)
    kept = {name: value for name, value in default_args.items() if name not in dropped}
    return {**kept, **user_args}, dropped


def _unknown(api: SGLangApi, name: str) -> str:
    nearest = difflib.get_close_matches(name, sorted(api.engine_arguments), n=1, cutoff=0.0)
    hint = f"; the nearest it has is {nearest[0]}" if nearest else ""
    return f"engine.args.{name}: sglang {api.version} has no such engine argument{hint}."
