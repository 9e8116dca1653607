"""What this SGLang has, asked of its source. No version string is compared anywhere."""

import ast
import re
from dataclasses import dataclass

from harness.rollout.sglang_api import source
from harness.rollout.sglang_api.source import SourceTree

ENGINE = "srt/entrypoints/engine.py"
OLD_ENGINE = "srt/server.py"
VERL_ENGINE = "srt/entrypoints/verl_engine.py"
BUCKET = "srt/weight_sync/tensor_bucket.py"
IO_STRUCT = "srt/managers/io_struct.py"
NUMA = "srt/utils/numa_utils.py"
WEIGHT_CHECKER = "srt/utils/weight_checker.py"
MODEL_RUNNER = "srt/model_executor/model_runner.py"
SCHEDULER_WEIGHTS = (
    "srt/managers/scheduler_components/weight_updater.py",
    "srt/managers/scheduler_update_weights_mixin.py",
)
PATCHES = ("srt/utils/patch_torch.py", "srt/patch_torch.py")
NONBLOCKING_VARIABLE = "SGLANG_BLOCK_NONZERO_RANK_CHILDREN"


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
    """sglang.srt.entrypoints.verl_engine exists: 0.4.3.post3 to 0.4.7.post1."""
    nonblocking_variable: str | None
    """Set it to "0" or Engine(node_rank >= 1) never returns. Since 0.4.1.post7."""
    memory_tags: tuple[str, ...] | None
    """Of release and resume, since 0.4.8 (kv_cache, weights; cuda_graph since 0.5.4.post2). None: they take none."""
    tensor_update_parameters: tuple[str, ...]
    """Of Engine.update_weights_from_tensor; load_format and flush_cache since 0.4.3.post3."""
    update_session: bool
    """Updates from tensors or a group are refused outside begin_weight_update / end_weight_update. Since 0.5.21."""
    update_session_selector: bool
    """begin_weight_update takes selector = target, draft or all. Since 0.5.21."""
    flattened_bucket: bool
    """load_format = "flattened_bucket" and its FlattenedTensorBucket. Since 0.5.1."""
    bucket_mixes_dtypes: bool
    """A bucket is bytes and may hold several dtypes. Since 0.5.6; before, torch.cat promotes them silently."""
    custom_weight_loader: bool
    """Engine(custom_weight_loader=[path]) and load_format=path. Since 0.4.8."""
    distributed_update_parameters: tuple[str, ...]
    """(name, dtype, shape) until 0.4.8.post1, then names, dtypes, shapes, group_name and flush_cache."""
    destroys_update_group: bool
    """Engine.destroy_weights_update_group exists, since 0.5.3; before, the group lives as long as the engine."""
    engine_flushes_cache: bool
    """Engine.flush_cache exists, since 0.4.5.post3."""
    weight_check_actions: tuple[str, ...]
    """Of tokenizer_manager.check_weights: snapshot, reset_tensors, compare since 0.5.6; checksum since 0.5.12."""
    checksum_covers_tp_ranks: bool
    """A checksum has one entry for each TP rank, since 0.5.13; in 0.5.12 TP rank 0 alone answers."""
    checksum_needs_cuda: bool
    """The checksum calls torch.cuda.synchronize, so CPU mode refuses it: 0.5.12 to 0.5.21 at least; not in 0.5.23."""
    cores_by_device: bool
    """In CPU mode SGLANG_CPU_OMP_THREADS_BIND has an entry for each engine rank of the host, since 0.5.19; before, one
    for each TP rank of the engine, on whatever host."""
    patches_reductions: bool
    """CUDA IPC handles name GPUs by UUID, since 0.4.4.post3; before, by index, which all ranks must then share."""
    custom_sigquit_handler: bool
    """Engine takes one in place of its own, which kills this process when a scheduler dies. Since 0.5.7."""


def probe(tree: SourceTree | None = None) -> SGLangApi:
    """Read the facts from `tree`, by default the installed sglang; nothing of sglang is imported.

    Raises ModuleNotFoundError when sglang is not installed, ValueError when the tree has no Engine.
    """
    tree = tree or source.installed("sglang")
    engine = source.methods(tree.find_class("Engine", ENGINE, OLD_ENGINE))
    if not engine:
        raise ValueError(f"{tree.root} has no class Engine in {ENGINE} or {OLD_ENGINE}: is it the folder of sglang?")
    arguments = frozenset(name for each in argument_classes(tree) for name in source.annotations(each))
    checks = tuple(re.findall(r'\baction == "(\w+)"', tree.text(WEIGHT_CHECKER)))
    checksum = tree.find_function("_compute_checksum", WEIGHT_CHECKER)
    answer = tree.find_function("check_weights", *SCHEDULER_WEIGHTS)
    bucket = tree.find_class("FlattenedTensorBucket", BUCKET)
    is_nonblocking = NONBLOCKING_VARIABLE in (tree.text(ENGINE) or tree.text(OLD_ENGINE))
    return SGLangApi(
        version=tree.version(),
        tree=tree,
        engine_arguments=arguments,
        own_verl_engine=tree.has(VERL_ENGINE),
        nonblocking_variable=NONBLOCKING_VARIABLE if is_nonblocking else None,
        memory_tags=_memory_tags(tree) if "tags" in engine.get("release_memory_occupation", ()) else None,
        tensor_update_parameters=engine.get("update_weights_from_tensor", ()),
        update_session="begin_weight_update" in engine,
        update_session_selector="selector" in engine.get("begin_weight_update", ()),
        flattened_bucket=bucket is not None,
        bucket_mixes_dtypes=source.mentions(bucket, "supports_multi_dtypes"),
        custom_weight_loader="custom_weight_loader" in arguments,
        distributed_update_parameters=engine.get("update_weights_from_distributed", ()),
        destroys_update_group="destroy_weights_update_group" in engine,
        engine_flushes_cache="flush_cache" in engine,
        weight_check_actions=checks,
        checksum_covers_tp_ranks="checksum" in checks and source.mentions(answer, "all_gather_object"),
        checksum_needs_cuda=source.mentions(checksum, "torch.cuda.synchronize"),
        cores_by_device="numa_index" in source.parameters(tree.find_function("init_threads_binding", NUMA)),
        patches_reductions=any(tree.has(path) for path in PATCHES),
        custom_sigquit_handler="custom_sigquit_handler" in arguments,
    )


def argument_classes(tree: SourceTree) -> list[ast.ClassDef]:
    """Return the classes whose annotated fields are the engine's arguments.

    These are ServerArgs, and since 0.5.20 the namespaces that it is composed of.
    """
    own = tree.find_class("ServerArgs", "srt/server_args.py")
    files = sorted((tree.root / "srt/arg_groups/fields").glob("*.py"))
    nodes = [node for file in files for node in tree.module(str(file.relative_to(tree.root))).body]
    return [node for node in (own, *nodes) if isinstance(node, ast.ClassDef)]


def _memory_tags(tree: SourceTree) -> tuple[str, ...]:
    assigned = [node for node in tree.module("srt/constants.py").body if isinstance(node, ast.Assign)]
    tags = [node for node in assigned if ast.unparse(node.targets[0]).startswith("GPU_MEMORY_TYPE_")]
    return tuple(ast.literal_eval(node.value) for node in tags)
