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
TOKENIZER_MANAGER = "srt/managers/tokenizer_manager.py"
NUMA = "srt/utils/numa_utils.py"
WEIGHT_CHECKER = "srt/utils/weight_checker.py"
WEIGHT_COMPARATOR = "srt/utils/weight_checker_comparator.py"
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
    """As the package reports it. For reports only."""
    tree: SourceTree
    """The source the facts were read from; environment.py reads more of it when asked."""
    engine_arguments: frozenset[str]
    """Keywords of sglang.Engine, that is fields of ServerArgs: a dataclass until 0.5.19, then a msgspec Struct."""
    own_verl_engine: bool
    """sglang.srt.entrypoints.verl_engine exists: 0.4.3.post3 to 0.4.7.post1."""
    own_verl_engine_flushes_cache: bool
    """Its update ends in a flush that is awaited. In 0.4.5.post3 to 0.4.6.post2 it is a coroutine nobody awaits, and
    the prefix cache of the old weights survives."""
    nonblocking_variable: str | None
    """Set it to "0" or Engine(node_rank >= 1) never returns. Since 0.4.1.post7."""
    memory_tags: tuple[str, ...] | None
    """Tags of release and resume, since 0.4.8 (kv_cache, weights; cuda_graph since 0.5.4.post2). None: they take no
    tags."""
    tensor_update_parameters: tuple[str, ...]
    """Of Engine.update_weights_from_tensor; load_format and flush_cache since 0.4.3.post3."""
    payload_per_tp_rank: bool
    """The engine serializes an update once for each TP rank, since 0.4.4.post2; before, all ranks opened one
    payload."""
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
    """Of Engine.update_weights_from_distributed: (name, dtype, shape) until 0.4.8.post1, then names, dtypes, shapes,
    group_name and flush_cache; load_format since 0.5.6."""
    destroys_update_group: bool
    """Engine.destroy_weights_update_group exists, since 0.5.3; before, the group lives as long as the engine."""
    engine_flushes_cache: bool
    """Engine.flush_cache exists, since 0.4.5.post3."""
    pause_modes: tuple[str, ...] | None
    """Modes of pause_generation, since 0.5.6. Empty: it takes none and aborts (since 0.4.9). None: no pause at all."""
    weight_check_actions: tuple[str, ...]
    """Of tokenizer_manager.check_weights: snapshot, reset_tensors, compare since 0.5.6; checksum since 0.5.12."""
    checksum_covers_tp_ranks: bool
    """A checksum has one entry for each TP rank, since 0.5.13; in 0.5.12 TP rank 0 alone answers."""
    checksum_needs_cuda: bool
    """The checksum calls torch.cuda.synchronize, so CPU mode refuses it: 0.5.12 to 0.5.21 at least; not in 0.5.23."""
    compare_needs_cuda: bool
    """The action compare moves tensors to a GPU, so CPU mode refuses it: in all releases up to 0.5.23."""
    batch_is_one_message: bool
    """generate(input_ids=[...]) reaches the scheduler as one message, so the first prefill batch does not depend on
    timing. Before, one message a prompt: the same seed may sample other tokens."""
    cores_by_device: bool
    """In CPU mode SGLANG_CPU_OMP_THREADS_BIND has an entry for each engine rank of the host, of all stages, since 0.5.19;
    before, one for each TP rank of the engine, on whatever host, and no other number."""
    sampling_seed: bool
    """sampling_params may carry a seed of its own, used under enable_deterministic_inference only."""

    @property
    def pipeline_parallel(self) -> bool:
        """Since 0.4.6.post2."""
        return "pp_size" in self.engine_arguments

    @property
    def patches_reductions(self) -> bool:
        """CUDA IPC handles can name GPUs by UUID, since 0.4.4.post3; before, by index, so all ranks must number them alike."""
        return any(self.tree.has(path) for path in PATCHES)

    @property
    def custom_sigquit_handler(self) -> bool:
        """Engine(custom_sigquit_handler=f) replaces the handler that kills this process when a scheduler dies. Since
        0.5.7."""
        return "custom_sigquit_handler" in self.engine_arguments


def probe(tree: SourceTree | None = None) -> SGLangApi:
    """Read the facts from `tree`, by default the installed sglang; nothing of sglang is imported.

    Raises ModuleNotFoundError when sglang is not installed, ValueError when the tree has no Engine.
    """
    tree = tree or source.installed("sglang")
    engine = source.methods(tree.find_class("Engine", ENGINE, OLD_ENGINE))
    if not engine:
        raise ValueError(f"{tree.root} has no class Engine in {ENGINE} or {OLD_ENGINE}: is it the folder of sglang?")
    engine_text = tree.text(ENGINE) or tree.text(OLD_ENGINE)
    arguments = _engine_arguments(tree)
    checks = source.compared_literals(tree.find_function("handle", WEIGHT_CHECKER), "action")
    bucket = tree.find_class("FlattenedTensorBucket", BUCKET)
    return SGLangApi(
        version=tree.version(),
        tree=tree,
        engine_arguments=arguments,
        own_verl_engine=tree.has(VERL_ENGINE),
        own_verl_engine_flushes_cache=_own_verl_engine_flushes(tree),
        nonblocking_variable=NONBLOCKING_VARIABLE if NONBLOCKING_VARIABLE in engine_text else None,
        memory_tags=_memory_tags(tree) if "tags" in engine.get("release_memory_occupation", ()) else None,
        tensor_update_parameters=engine.get("update_weights_from_tensor", ()),
        payload_per_tp_rank=re.search(r"serialized_named_tensors: .*List\[", tree.text(IO_STRUCT)) is not None,
        update_session="begin_weight_update" in engine,
        update_session_selector="selector" in engine.get("begin_weight_update", ()),
        flattened_bucket=bucket is not None,
        bucket_mixes_dtypes=bucket is not None and source.mentions(bucket, "supports_multi_dtypes"),
        custom_weight_loader="custom_weight_loader" in arguments,
        distributed_update_parameters=engine.get("update_weights_from_distributed", ()),
        destroys_update_group="destroy_weights_update_group" in engine,
        engine_flushes_cache="flush_cache" in engine,
        pause_modes=_pause_modes(tree),
        weight_check_actions=checks,
        checksum_covers_tp_ranks="checksum" in checks
        and source.mentions(tree.find_function("check_weights", *SCHEDULER_WEIGHTS), "all_gather_object"),
        checksum_needs_cuda=source.mentions(
            tree.find_function("_compute_checksum", WEIGHT_CHECKER), "torch.cuda.synchronize"
        ),
        compare_needs_cuda=any(".cuda()" in tree.text(path) for path in (WEIGHT_CHECKER, WEIGHT_COMPARATOR)),
        batch_is_one_message="_batch_has_text" in tree.text(TOKENIZER_MANAGER),
        cores_by_device="numa_index" in source.parameters(tree.find_function("init_threads_binding", NUMA)),
        sampling_seed="sampling_seed" in tree.text("srt/sampling/sampling_batch_info.py"),
    )


def _engine_arguments(tree: SourceTree) -> frozenset[str]:
    """Fields of ServerArgs: its own, or since 0.5.20 those of the namespaces it is composed of."""
    return frozenset(name for each in argument_classes(tree) for name in source.annotated_fields(each))


def argument_classes(tree: SourceTree) -> list[ast.ClassDef]:
    """The classes whose annotated fields are the engine's arguments."""
    own = tree.find_class("ServerArgs", "srt/server_args.py")
    found = [own] if own else []
    for path in sorted((tree.root / "srt/arg_groups/fields").glob("*.py")):
        found += [node for node in tree.module(str(path.relative_to(tree.root))).body if isinstance(node, ast.ClassDef)]
    return found


def _memory_tags(tree: SourceTree) -> tuple[str, ...]:
    constants = source.string_assignments(tree.module("srt/constants.py"))
    return tuple(value for name, value in constants.items() if name.startswith("GPU_MEMORY_TYPE_"))


def _own_verl_engine_flushes(tree: SourceTree) -> bool:
    if not tree.has(VERL_ENGINE):
        return False
    is_coroutine = "async def flush_cache" in tree.text(TOKENIZER_MANAGER)
    return "self._engine.flush_cache()" in tree.text(VERL_ENGINE) or not is_coroutine


def _pause_modes(tree: SourceTree) -> tuple[str, ...] | None:
    if "async def pause_generation(" not in tree.text(TOKENIZER_MANAGER):
        return None
    request = tree.find_class("PauseGenerationReqInput", IO_STRUCT)
    for node in request.body if request else []:
        if isinstance(node, ast.AnnAssign) and source.dotted_name(node.target) == "mode":
            literals = (n for n in ast.walk(node.annotation) if isinstance(n, ast.Constant))
            return tuple(n.value for n in literals if isinstance(n.value, str))
    return ()
