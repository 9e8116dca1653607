"""Read from SGLang's source what the installed release has, without importing it. No version string is compared anywhere.

Importing any module of sglang takes 8 s; reading its source less than 1 s. Only what differs between the supported
releases, 0.5.11 to 0.5.23, is a fact here.
"""

import ast
import importlib
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config.engine_rules import unknown_argument
from harness.config.facts import EngineArgument, SGLangFacts

Function = ast.FunctionDef | ast.AsyncFunctionDef

ENGINE = "srt/entrypoints/engine.py"
BUCKET = "srt/weight_sync/tensor_bucket.py"
IO_STRUCT = "srt/managers/io_struct.py"
CUSTOM_ALL_REDUCES = tuple(
    f"srt/distributed/device_communicators/{name}.py" for name in ("custom_all_reduce", "custom_all_reduce_v2")
)
BREAKABLE_GRAPHS = "srt/model_executor/runner_backend/breakable_cuda_graph_backend.py"

CHOICES = "srt/arg_groups/choices.py"
ABSORBED_MLA = ("srt/plugins/__init__.py", "srt/models/deepseek_common/attention_backend_handler.py")
"""Files without which the stand-ins cannot register the absorbed method of MLA for the CPU: plugins, and the
registry."""

LLAMA = "srt/models/llama.py"
EAGLE_WORKER = "srt/speculative/eagle_worker_v2.py"
VERIFY = "srt/speculative/eagle_utils.py"
SCHEDULERS_UPDATES = "srt/managers/scheduler_components/weight_updater.py"


@dataclass(frozen=True)
class SourceTree:
    """The folder of one package. Paths are relative to it. A missing file reads as an empty one."""

    root: Path
    _modules: dict[str, ast.Module] = field(default_factory=dict, repr=False, compare=False)

    def has(self, path: str) -> bool:
        return (self.root / path).is_file()

    def text(self, path: str) -> str:
        return (self.root / path).read_text(encoding="utf-8") if self.has(path) else ""

    def module(self, path: str) -> ast.Module:
        """Return the syntax tree of a file, parsed once."""
        if path not in self._modules:
            self._modules[path] = ast.parse(self.text(path))
        return self._modules[path]

    def find_class(self, name: str, path: str) -> ast.ClassDef | None:
        nodes = self.module(path).body
        return next((node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name), None)

    def find_function(self, name: str, path: str) -> Function | None:
        """Return the first function or method of that name, at any depth."""
        nodes = ast.walk(self.module(path))
        return next((node for node in nodes if isinstance(node, Function) and node.name == name), None)

    def assigned(self, path: str) -> dict[str, ast.expr]:
        """Return the expressions that a file assigns at its top level, by name."""
        nodes = (node for node in self.module(path).body if isinstance(node, ast.Assign))
        return {ast.unparse(node.targets[0]): node.value for node in nodes}

    def version(self) -> str:
        """Return the literal `__version__`, or "unknown". It is for reports: no code may branch on it."""
        text = self.text("_version.py") + self.text("version.py")
        found = re.search(r"""^__version__\b[^'"\n]*=\s*['"]([^'"]+)['"]""", text, re.MULTILINE)
        return found[1] if found else "unknown"


def installed(package: str) -> SourceTree:
    """Return the source of an installed top-level package. Raise ModuleNotFoundError if it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"package {package} is not installed in this environment", name=package)
    return SourceTree(Path(spec.submodule_search_locations[0]))


def load(path: str, name: str) -> Any:
    """Import a module of sglang, given as a path in the package, and return its `name`. Nothing else imports sglang."""
    return getattr(importlib.import_module("sglang." + path.removesuffix(".py").replace("/", ".")), name)


def methods(cls: ast.ClassDef | None) -> dict[str, tuple[str, ...]]:
    """Return the parameter names of each method, in order, without self. Keyword-only ones come last."""
    return {node.name: parameters(node) for node in (cls.body if cls else []) if isinstance(node, Function)}


def parameters(function: Function) -> tuple[str, ...]:
    """Return the parameter names of a function, without self or cls."""
    each = function.args
    names = [argument.arg for argument in each.posonlyargs + each.args + each.kwonlyargs]
    return tuple(name for name in names if name not in ("self", "cls"))


def annotations(cls: ast.ClassDef | None) -> dict[str, ast.expr]:
    """Return the annotations of a class's public fields, as dataclasses and msgspec see them, without ClassVars."""
    return {
        node.target.id: node.annotation
        for node in (cls.body if cls else [])
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if not node.target.id.startswith("_") and not re.match(r"(\w+\.)*ClassVar\b", ast.unparse(node.annotation))
    }


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
    tree = tree or installed("sglang")
    engine = methods(tree.find_class("Engine", ENGINE))
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
        cores_by_device=binding is not None and "numa_index" in parameters(binding),
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
    found = annotations(tree.find_class("ServerArgs", "srt/server_args.py"))
    for each in classes:
        found |= annotations(each) if isinstance(each, ast.ClassDef) else {}
    return found


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


def engine_facts(api: SGLangApi) -> SGLangFacts:
    """Return the facts of this sglang that decide whether a config can work."""
    return SGLangFacts(
        version=api.version,
        arguments={name: _argument(api, each) for name, each in engine_argument_annotations(api.tree).items()},
        serves_mla_on_cpu=all(map(api.tree.has, ABSORBED_MLA)),
        loads_block_scales_of_llama=_llama_loads_block_scales(api.tree),
        returns_routing=api.routed_experts and "enable_return_routed_experts" in api.engine_arguments,
        why_no_drafts_on_cpu=_why_no_drafts_on_cpu(api.tree),
        updates_drafts_by_group="load_weights_from_distributed" in api.tree.text(SCHEDULERS_UPDATES),
        returns_routing_on_cpu=api.tree.find_class("BaseHostCache", "srt/state_capturer/base.py") is not None,
    )


def _why_no_drafts_on_cpu(tree: SourceTree) -> str:
    """Return what the EAGLE worker lacks for rollouts on a CPU, or "" if harness_sglang_draft can stand in for the
    rest.
    """
    if "_is_cpu" not in tree.text(EAGLE_WORKER):
        return "its draft workers wait for CUDA streams"
    if "def _verify_uses_greedy" not in tree.text(VERIFY):
        return "on a CPU it takes the likeliest token whatever the temperature, so responses would not be sampled"
    return ""


def _llama_loads_block_scales(tree: SourceTree) -> bool:
    """Return whether Llama's load_weights takes weight_scale_inv by its own name, at least for block-FP8
    (sglang#30234).
    """
    text = tree.text(LLAMA)
    return '(".weight_scale_inv", ".weight_scale")' not in text or "weight_block_size" in text


def _argument(api: SGLangApi, annotation: ast.expr) -> EngineArgument:
    """Read an annotation: T, or since 0.5.20 A[T, Arg(choices=...)]."""
    kind, details = annotation, list[ast.expr]()
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("A", "Annotated"):
        assert isinstance(annotation.slice, ast.Tuple)
        kind, *details = annotation.slice.elts
    words = re.findall(r"\w+", ast.unparse(kind))
    is_optional = "Optional" in words
    kinds = [word for word in words if word not in ("typing", "Optional", "Union")] + ["None"] * is_optional
    return EngineArgument(kinds=tuple(kinds), choices=_choices(api, details))


def _choices(api: SGLangApi, details: list[ast.expr]) -> tuple[str, ...]:
    """Return the choices of Arg(choices=...): a list, or the name of one."""
    given = [
        key.value for each in details if isinstance(each, ast.Call) for key in each.keywords if key.arg == "choices"
    ]
    lists = [api.tree.assigned(CHOICES).get(ast.unparse(each), each) for each in given]
    constants = [node for each in lists for node in ast.walk(each) if isinstance(node, ast.Constant)]
    return tuple(node.value for node in constants if isinstance(node.value, str))
