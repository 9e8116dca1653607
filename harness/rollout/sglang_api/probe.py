"""Read from SGLang's source what the installed release has. No version string is compared anywhere.

Only what differs between the supported releases, 0.5.11 to 0.5.23, is a fact here.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.engine_rules import unknown_argument
from harness.rollout.sglang_api import source
from harness.rollout.sglang_api.source import SourceTree

ENGINE = "srt/entrypoints/engine.py"
BUCKET = "srt/weight_sync/tensor_bucket.py"
IO_STRUCT = "srt/managers/io_struct.py"
CUSTOM_ALL_REDUCES = tuple(
    f"srt/distributed/device_communicators/{name}.py" for name in ("custom_all_reduce", "custom_all_reduce_v2")
)
BREAKABLE_GRAPHS = "srt/model_executor/runner_backend/breakable_cuda_graph_backend.py"


class UnknownEngineArgument(ValueError):
    """The installed SGLang does not have this engine argument, or does not take this value."""


@dataclass(frozen=True, kw_only=True)
class SGLangApi:
    """Facts about one release of SGLang. "Since" is for the reader: no code compares versions."""

    version: str
    """For reports only."""
    tree: SourceTree
    """The source that the facts were read from. Other modules read more of it on demand."""
    engine_arguments: frozenset[str]
    """The keyword arguments of sglang.Engine."""
    update_session: bool
    """Updates from tensors or a group are refused outside begin_weight_update / end_weight_update. Since 0.5.21."""
    cores_by_device: bool
    """In CPU mode SGLANG_CPU_OMP_THREADS_BIND has one entry per engine rank on the host. Since 0.5.19; before, one
    entry per TP rank of the engine, whatever its host."""
    routed_experts: bool
    """generate(return_routed_experts=True) says which experts each token took. Since 0.5.7, so for every supported
    release; a fact because the flag was lost on the way more than once (slime#1145, miles#407)."""
    graphs_in_memory_saver: bool
    """The memory of CUDA graphs can be released by the tag "cuda_graph". Not in 0.5.12 and 0.5.13, where the default
    custom all-reduce ignores SGLANG_MEMORY_SAVER_CUDA_GRAPH and would register memory that cannot be shared; in 0.5.16
    and newer."""
    breakable_graphs: bool
    """Prefill may be captured in graphs with breaks, which refuse to start in the memory saver. In 0.5.14 and newer,
    where they are what SGLang captures for most models by itself."""


def probe(tree: SourceTree | None = None) -> SGLangApi:
    """Read the facts from `tree`, by default the installed sglang, without importing it.

    Raises ModuleNotFoundError if sglang is not installed, ValueError if the tree has no Engine.
    """
    tree = tree or source.installed("sglang")
    engine = source.methods(tree.find_class("Engine", ENGINE))
    if not engine:
        raise ValueError(
            f"{tree.root} has no class Engine in {ENGINE}: give the folder of an installed sglang, 0.5.11 or newer."
        )
    binding = tree.find_function("init_threads_binding", "srt/utils/numa_utils.py")
    return SGLangApi(
        version=tree.version(),
        tree=tree,
        engine_arguments=frozenset(engine_argument_annotations(tree)),
        update_session="begin_weight_update" in engine,
        cores_by_device=binding is not None and "numa_index" in source.parameters(binding),
        routed_experts="return_routed_experts" in engine.get("generate", ()),
        graphs_in_memory_saver=_puts_graphs_into_memory_saver(tree),
        breakable_graphs=tree.has(BREAKABLE_GRAPHS),
    )


def _puts_graphs_into_memory_saver(tree: SourceTree) -> bool:
    """Return whether SGLang has a tag for the memory of graphs, and its custom all-reduces work with such graphs."""
    reduces = [text for file in CUSTOM_ALL_REDUCES if (text := tree.text(file))]
    return "GPU_MEMORY_TYPE_CUDA_GRAPH" in tree.assigned("srt/constants.py") and all(
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH" in text for text in reduces
    )


def engine_argument_annotations(tree: SourceTree) -> dict[str, ast.expr]:
    """Return the annotations of the engine's arguments by name.

    They are the fields of ServerArgs: a dataclass until 0.5.19, then a msgspec Struct. Since 0.5.20 it is composed of
    namespaces, each in a file of arg_groups/fields.
    """
    files = sorted((tree.root / "srt/arg_groups/fields").glob("*.py"))
    classes = [node for file in files for node in tree.module(str(file.relative_to(tree.root))).body]
    found = source.annotations(tree.find_class("ServerArgs", "srt/server_args.py"))
    for each in classes:
        found |= source.annotations(each) if isinstance(each, ast.ClassDef) else {}
    return found


def model_classes(tree: SourceTree) -> dict[Path, frozenset[str]]:
    """Return the architectures that each file of SGLang's models offers to its registry.

    A file that cannot be imported on this machine offers none when SGLang runs.
    """
    files = sorted((tree.root / "srt" / "models").glob("*.py"))
    return {file: entry_classes(file.read_text(encoding="utf-8")) for file in files}


def entry_classes(text: str) -> frozenset[str]:
    """Return the classes that the text of a file of SGLang's models names as its EntryClass."""
    found = re.search(r"^EntryClass\b[^=]*=\s*(\[[^\]]*\]|\w+)", text, re.MULTILINE)
    return frozenset(re.findall(r"\w+", found[1])) if found else frozenset()


def check_arguments(
    api: SGLangApi, user_args: Mapping[str, Any], default_args: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the arguments to build the engine with, and the names of the defaults that this SGLang does not have.

    A user's argument replaces the default. Unknown defaults are dropped: they turn off features, and a release without
    the argument does not have the feature. Raises UnknownEngineArgument for an unknown argument of the user.
    """
    for name in user_args:
        if name not in api.engine_arguments:
            problem = unknown_argument(name, api.engine_arguments, api.version)
            raise UnknownEngineArgument(f"engine.args.{name}: {problem}.")
    dropped = tuple(name for name in default_args if name not in api.engine_arguments)
    kept = {name: value for name, value in default_args.items() if name not in dropped}
    return {**kept, **user_args}, dropped
