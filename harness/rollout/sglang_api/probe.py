"""What this SGLang has, asked of its source. No version string is compared anywhere.

The oldest release that still installs is 0.4.6.post5; what every release since then has is not asked.
"""

import ast
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.rollout.sglang_api import source
from harness.rollout.sglang_api.source import SourceTree

ENGINE = "srt/entrypoints/engine.py"
VERL_ENGINE = "srt/entrypoints/verl_engine.py"
BUCKET = "srt/weight_sync/tensor_bucket.py"


class UnknownEngineArgument(ValueError):
    """The user named an engine argument that this SGLang does not have, or gave it a value that it cannot take."""


@dataclass(frozen=True, kw_only=True)
class SGLangApi:
    """Facts about one SGLang. "Since" names the first release that has it, for the reader; no code compares it."""

    version: str
    """For reports only."""
    tree: SourceTree
    """The source the facts were read from; other modules read more of it when asked."""
    engine_arguments: frozenset[str]
    """Keywords of sglang.Engine, that is fields of ServerArgs: a dataclass until 0.5.19, then a msgspec Struct."""
    own_verl_engine: bool
    """sglang.srt.entrypoints.verl_engine exists: until 0.4.7.post1."""
    memory_tags: tuple[str, ...] | None
    """Of release and resume, since 0.4.8 (kv_cache, weights; cuda_graph since 0.5.4.post2). None: they take none."""
    update_session: bool
    """Updates from tensors or a group are refused outside begin_weight_update / end_weight_update. Since 0.5.21."""
    bucket_mixes_dtypes: bool
    """load_format = "flattened_bucket" takes several dtypes at once. Since 0.5.6; from 0.5.1 torch.cat promotes them."""
    custom_weight_loader: bool
    """Engine(custom_weight_loader=[path]) and load_format=path. Since 0.4.8."""
    distributed_update_parameters: tuple[str, ...]
    """(name, dtype, shape) until 0.4.8.post1, then names, dtypes, shapes, group_name and flush_cache."""
    destroys_update_group: bool
    """Engine.destroy_weights_update_group exists, since 0.5.3; before, the group lives as long as the engine."""
    cores_by_device: bool
    """In CPU mode SGLANG_CPU_OMP_THREADS_BIND has an entry for each engine rank of the host, since 0.5.19; before, one
    for each TP rank of the engine, on whatever host."""
    custom_sigquit_handler: bool
    """Engine takes one in place of its own, which kills this process when a scheduler dies. Since 0.5.7."""


def probe(tree: SourceTree | None = None) -> SGLangApi:
    """Read the facts from `tree`, by default the installed sglang; nothing of sglang is imported.

    Raises ModuleNotFoundError when sglang is not installed, ValueError when the tree has no Engine.
    """
    tree = tree or source.installed("sglang")
    engine = source.methods(tree.find_class("Engine", ENGINE))
    if not engine:
        raise ValueError(
            f"{tree.root} has no class Engine in {ENGINE}: is it the folder of sglang, 0.4.6.post5 or newer?"
        )
    arguments = frozenset(engine_argument_annotations(tree))
    constants = tree.assigned("srt/constants.py")
    tags = tuple(ast.literal_eval(constants[name]) for name in constants if name.startswith("GPU_MEMORY_TYPE_"))
    binding = tree.find_function("init_threads_binding", "srt/utils/numa_utils.py")
    return SGLangApi(
        version=tree.version(),
        tree=tree,
        engine_arguments=arguments,
        own_verl_engine=tree.has(VERL_ENGINE),
        memory_tags=tags if "tags" in engine.get("release_memory_occupation", ()) else None,
        update_session="begin_weight_update" in engine,
        bucket_mixes_dtypes="supports_multi_dtypes" in tree.text(BUCKET),
        custom_weight_loader="custom_weight_loader" in arguments,
        distributed_update_parameters=engine.get("update_weights_from_distributed", ()),
        destroys_update_group="destroy_weights_update_group" in engine,
        cores_by_device=binding is not None and "numa_index" in source.parameters(binding),
        custom_sigquit_handler="custom_sigquit_handler" in arguments,
    )


def engine_argument_annotations(tree: SourceTree) -> dict[str, ast.expr]:
    """Return the annotations of the engine's arguments by name.

    They are fields of ServerArgs, and since 0.5.20 of the namespaces that it is composed of.
    """
    files = sorted((tree.root / "srt/arg_groups/fields").glob("*.py"))
    classes = [node for file in files for node in tree.module(str(file.relative_to(tree.root))).body]
    found = source.annotations(tree.find_class("ServerArgs", "srt/server_args.py"))
    for each in classes:
        found |= source.annotations(each) if isinstance(each, ast.ClassDef) else {}
    return found


def check_arguments(
    api: SGLangApi, user_args: Mapping[str, Any], default_args: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the arguments to build the engine with, and the names of the defaults that this SGLang does not have.

    A user's argument replaces the default of that name. Unknown defaults are dropped: they turn off a feature that
    releases without the argument do not have. Raises UnknownEngineArgument for an unknown argument of the user.
    """
    for name in user_args:
        if name not in api.engine_arguments:
            nearest = difflib.get_close_matches(name, sorted(api.engine_arguments), n=1, cutoff=0.0)
            hint = f"; the nearest it has is {nearest[0]}" if nearest else ""
            raise UnknownEngineArgument(f"engine.args.{name}: sglang {api.version} has no such engine argument{hint}.")
    dropped = tuple(name for name in default_args if name not in api.engine_arguments)
    kept = {name: value for name, value in default_args.items() if name not in dropped}
    return {**kept, **user_args}, dropped
