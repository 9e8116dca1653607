"""SGLang's own model class on the meta device, as one rank of an engine of any size would build it: no memory, no
network.

The process groups are torch's "fake" backend: each knows its rank and size, and a collective call does nothing. SGLang
keeps one configuration for each process, so one process builds one rank.
"""

import importlib
import inspect
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from harness.config.model_fields import WEIGHT_INDEX
from harness.rollout.engine_settings import without_models_code
from harness.rollout.served_models import DRAFT_CLASS
from harness.rollout.sglang_api.probe import installed, load
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.engine_class.absent_hardware import (
    define_kernels,
    mxfp4_of_gpu,
    shapes_of_gpu,
    without_warm_up,
)
from harness.tools.engine_class.meta_groups import resolved_arguments, start_rank
from harness.tools.engine_class.meta_kv_cache import KvCache, kv_caches
from harness.tools.models_code import model_classes

SINKS = {"GptOssForCausalLM": "triton"}
"""Classes with attention sinks, for which SGLang refuses torch_native -> a backend that it takes on any GPU."""


class MetaRank(NamedTuple):
    """One rank of an engine, built on the meta device."""

    model: Any
    """SGLang's model."""
    kv_caches: dict[str, KvCache]
    """The KV cache of one token by kind of kv_cache_dtype, see meta_kv_cache.py. Empty for a draft model."""
    notes: tuple[str, ...]
    """What SGLang decided by itself, and a reader of its answer should know."""
    unfit: str = ""
    """Why such an engine cannot serve, though SGLang builds it; "" if nothing is known."""


def prepare_import(folder: Path, draft: bool = False) -> None:
    """Have SGLang import the classes of this model alone, and not its two hundred others.

    Call it before sglang is imported.

    folder: with config.json. draft: also those of draft models, because only SGLang knows which one it is. Raise
    UnsupportedEnvironment if this release has no class of that architecture.
    """
    wanted, classes = _architectures(folder), model_classes(installed("sglang"))
    if not any(wanted & each for each in classes.values()):
        raise UnsupportedEnvironment(
            f"sglang {installed('sglang').version()} has no class for {' or '.join(sorted(wanted)) or 'this config.json'}"
        )
    drafts = {file for file, names in classes.items() if draft and any(map(DRAFT_CLASS.search, names))}
    others = [file.stem for file, names in classes.items() if not names & wanted and file not in drafts]
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(others)


def _architectures(folder: Path) -> set[str]:
    return set(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or ())


def _models() -> Path:
    """Return the folder of SGLang's classes."""
    return installed("sglang").root / "srt" / "models"


def import_all(folder: Path) -> None:
    """Import what build_on_meta needs.

    SGLang's modules make tensors when they are imported, so never below a device mode.

    Raise UnsupportedEnvironment if SGLang, or its class that config.json names, cannot be imported here. Without the
    class SGLang itself would log that and take a class of transformers.
    """
    wanted = _architectures(folder)
    with _importing("srt.server_args"):
        _module("srt.server_args")
        define_kernels(_models())
    for file, names in model_classes(installed("sglang")).items():
        if names & wanted:
            with _importing(" or ".join(sorted(names))):
                _module(f"srt.models.{file.stem}")
    with _importing("srt.model_loader.loader"):
        for module in ("srt.model_loader.loader", "srt.models.registry", "srt.layers.moe"):
            _module(module)
    mxfp4_of_gpu()


@contextmanager
def _importing(what: str) -> Iterator[None]:
    """Raise UnsupportedEnvironment for whatever SGLang's files raise while they are imported, because it is the
    reason.
    """
    try:
        yield
    except Exception as error:
        raise UnsupportedEnvironment(
            f"sglang {installed('sglang').version()} cannot import {what} here: {type(error).__name__}: {error}"
        ) from error


def reads_index(folder: Path) -> bool:
    """Return whether SGLang's class of this model looks into the checkpoint's index of names while it is built."""
    wanted, classes = _architectures(folder), model_classes(installed("sglang"))
    return any(WEIGHT_INDEX in file.read_text(encoding="utf-8") for file, names in classes.items() if names & wanted)


def build_on_meta(
    folder: Path, arguments: Mapping[str, Any], rank: int, draft: bool = False, *, enlarged: bool = False
) -> MetaRank:
    """Return one engine rank, with SGLang's quantization, placement of experts, and pipeline stage.

    folder: with config.json. arguments: SGLang's server arguments. rank: in the engine, stage by stage. draft: the
    rank's draft model instead, which speculative_algorithm among the arguments asks for. enlarged: with the sizes that
    SGLang's CPU mode makes of those that do not divide over the ranks. Whatever SGLang itself raises for a model that
    it cannot build passes through. Raise UnsupportedEnvironment for a release whose groups want what is not known here,
    and if SGLang would build another class than the one that it should.
    """
    server_arguments = load("srt/server_args.py", "ServerArgs")(
        model_path=str(folder), device="cpu", load_format="dummy", skip_tokenizer_init=True,
        attention_backend=_attention_backend(folder), disable_overlap_schedule=True, disable_radix_cache=True,
        **without_models_code(arguments),
    )  # fmt: skip
    world = server_arguments.tp_size * server_arguments.pp_size
    _join_fake_groups(rank, world)
    model_config = start_rank(server_arguments, rank)
    if draft:
        config_class = _module("srt.configs.model_config").ModelConfig
        model_config = config_class.from_server_args(server_arguments, model_path=str(folder), is_draft_model=True)
    loader, load_config = _module("srt.model_loader.loader"), load("srt/configs/load_config.py", "LoadConfig")("dummy")
    heads = model_config.num_attention_heads
    if enlarged:
        adjust = _module("srt.configs.update_config").adjust_config_with_unaligned_cpu_tp
        model_config = adjust(model_config, load_config, server_arguments.tp_size)
    _check_class(model_config)
    shapes_of_gpu(model_config.hf_config)
    quantization = loader._get_quantization_config(model_config, load_config)
    torch.set_default_dtype(model_config.dtype)
    scope = _draft_scope(model_config, server_arguments.speculative_algorithm) if draft else nullcontext()
    with scope, torch.device("meta"):
        model = loader._initialize_model(model_config, load_config, quantization)
    without_warm_up(model)
    resolved = resolved_arguments(server_arguments)
    if draft:
        return MetaRank(model, {}, ())
    _check_pipeline(model, resolved.pp_size)
    notes = tuple(_notes(model_config, arguments))
    unfit = _lacks_attention_dp(model, heads, arguments)
    return MetaRank(model, kv_caches(model, model_config, server_arguments, resolved), notes, unfit)


def _lacks_attention_dp(model: Any, heads: int, arguments: Mapping[str, Any]) -> str:
    """Return a sentence if the class cuts its attention over all ranks although the engine has attention DP; else "".

    heads: of the whole model. Each group of attention DP serves other requests and allocates a KV cache for the heads
    of its own ranks, so together they must hold all heads; a class that divides them by tp_size would add up ranks of
    other requests.
    """
    groups = arguments.get("dp_size") or 1
    if groups == 1 or not arguments.get("enable_dp_attention"):
        return ""
    held = max((getattr(module, "tp_q_head_num", 0) for module in model.modules()), default=0)
    ranks = arguments["tp_size"] // groups
    if not held or held * ranks >= heads:
        return ""
    return (
        f"SGLang's {type(model).__name__} does not know attention DP: with {groups} groups of {ranks} rank(s) each rank must have"
        f" {heads // ranks} of the {heads} attention heads, as each group serves other requests, and this class gives it"
        f" {held}, as without attention DP"
    )


def _check_pipeline(model: Any, stages: int) -> None:
    """Raise what SGLang's ModelRunner raises, once the model is built, for a class that cannot be one stage of
    several.
    """
    if stages > 1 and "pp_proxy_tensors" not in inspect.signature(model.forward).parameters:
        raise AssertionError("Pipeline Parallel is not compatible with this model.")


def _notes(model_config: Any, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield what SGLang decides about some classes by itself: it serves no images with them unless it is asked to."""
    names = model_config.hf_config.architectures
    can_see = _module("srt.configs.model_config").is_multimodal_model(names)
    if can_see and not model_config.is_multimodal and arguments.get("enable_multimodal") is None:
        yield (
            f"SGLang disables multimodal input for {names[0]} by default, and may then build the language model alone;"
            " engine.args.enable_multimodal = true in a run's config enables it, or --engine.args.enable_multimodal true with --nnodes"
        )


def _attention_backend(folder: Path) -> str:
    """Return the attention backend to name in SGLang's arguments. None is made here, but SGLang checks the name."""
    return next((SINKS[name] for name in _architectures(folder) if name in SINKS), "torch_native")


def _check_class(model_config: Any) -> None:
    """Raise UnsupportedEnvironment if SGLang's registry lacks the class, in whose place it would take one of
    transformers.
    """
    wanted = model_config.hf_config.architectures  # those of config.json, or SGLang's own for a draft model
    if not set(wanted) & set(_module("srt.models.registry").ModelRegistry.get_supported_archs()):
        raise UnsupportedEnvironment(
            f"sglang {installed('sglang').version()} could not import {' or '.join(wanted)} here"
        )


@contextmanager
def _draft_scope(model_config: Any, algorithm: str) -> Iterator[None]:
    """Do what SGLang's EagleDraftWorker does around the draft model that it builds: its groups, and its kernels of
    experts.
    """
    parallel, utils = _module("srt.speculative.draft_parallel"), _module("srt.speculative.spec_utils")
    moe, algorithms = _module("srt.layers.moe.utils"), _module("srt.speculative.spec_info").SpeculativeAlgorithm
    spec = parallel.model_draft_parallel_spec(model_config, spec_algorithm=algorithms.from_string(algorithm))
    with ExitStack() as stack:
        stack.enter_context(utils.draft_tp_context(parallel.resolve_draft_parallel_layout(spec)))
        stack.enter_context(utils.draft_pp_context())
        stack.enter_context(moe.speculative_moe_backend_context())
        stack.enter_context(moe.speculative_moe_a2a_backend_context())
        stack.enter_context(moe.draft_model_build_scope())
        yield


def embedding_and_head(model: Any, stages: int) -> dict[str, str]:
    """Return what the "embedding" and the "head" of a target, or of its draft model, are called.

    The two models share them: SGLang puts the target's own in the place of the draft's.

    With several pipeline stages only the head: the last stage, which has the draft model, has no embedding of the
    target. Empty for a class that hands out none.
    """
    if not hasattr(model, "get_embed_and_head"):
        return {}
    embedding, head = model.get_embed_and_head()
    names = {id(each): name for name, each in model.named_parameters()}
    shared = {"head": head} if stages > 1 else {"embedding": embedding, "head": head}
    return {part: names[id(each)] for part, each in shared.items() if id(each) in names}


def _module(name: str) -> Any:
    return importlib.import_module(f"sglang.{name}")


def _join_fake_groups(rank: int, world: int) -> None:
    """Make every process group of this process a fake one.

    That lasts for the life of the process, which builds one rank.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    real_new_group = dist.new_group
    accepted = inspect.signature(real_new_group).parameters

    def new_fake_group(ranks: Any = None, *_: Any, **keywords: Any) -> Any:
        return real_new_group(
            ranks, **{key: value for key, value in keywords.items() if key in accepted} | {"backend": "fake"}
        )

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    patch.object(dist, "new_group", new_fake_group).start()
    queue = _module("srt.distributed.device_communicators.shm_broadcast").MessageQueue
    patch.object(queue, "create_from_process_group", staticmethod(lambda *_, **__: None)).start()
    state = _module("srt.distributed.parallel_state")
    patch.object(state, "in_the_same_node_as", lambda *_, **__: [True] * world).start()
