"""A whole run at the model's true size: what the fullest GPU holds in each stage of a step.

Engine and trainer answer by their own code (`engine_class/traced_ranks.py`, `trainer_memory.py`). SGLang's own code
counts the KV cache of one token. What CUDA, NCCL and SGLang keep beside is not executed, but a number that was measured
once (`gpu_stages.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from harness.cluster.mesh import ParallelDims
from harness.config.layers import ConfigError
from harness.config.schema import Config
from harness.runtime import GIB, MIB
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.engine_class.forks import ForkEnded, in_forks
from harness.tools.engine_class.meta_kv_cache import KvCache
from harness.tools.engine_class.traced_ranks import EngineRank
from harness.tools.full_size.gpu_stages import EngineShare, GpuMemory, Shares, TrainerShare, engine_arguments
from harness.tools.full_size.trainer_memory import Execution, Role, TrainerPeaks, trainer_peaks
from harness.tools.full_size.trainer_names import TrainerNames, trainer_class
from harness.weights.fusing import FusingGroup
from harness.weights.gather import plan_buckets

COMPUTING = "gathered layers, activations"
"""A part of a stage: what executing it on fake tensors counted, beside what the other parts name."""
OTHER_RULES = ("enable_hisparse", "enable_unified_memory", "enable_kv_cache_sharding", "dcp_size")
"""Arguments with which SGLang sizes its pools by rules that are not known here."""
WINDOW_RULES = ("disable_hybrid_swa_memory", "max_running_requests")
"""Further ones, for a model with sliding windows."""
STATE_RULES = ("max_mamba_cache_size", "mamba_full_memory_ratio", "max_running_requests", "speculative_algorithm")
"""Further ones, for a model with states of linear attention."""


def measure_trainer(folder: Path, config: Config, processes: int) -> dict[Role, TrainerPeaks]:
    """Execute a step of each of the trainer's models, each in a forked process of its own.

    Raise ConfigError for a model that no run can train, UnsupportedEnvironment for one that cannot be measured here.
    """
    model_class, model_config = trainer_class(folder)
    if type(model_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"a run trains a causal language model, and transformers {transformers.__version__} has none for"
            f" {model_class.__name__} (model_type {model_config.model_type}), which reads more than text; leave out --nnodes"
            " to ask about the engine alone, or give the config.json of a language model."
        )
    if getattr(model_config, "quantization_config", None) is not None:
        del model_config.quantization_config  # a trainer computes in config.model.dtype
    roles: list[Role] = ["actor"]
    if config.algorithm.has_critic:
        roles.append("critic")
    if config.algorithm.kl_placement != "none":
        roles.append("reference")
    ranks = ParallelDims.of(config.parallel).world_size
    executions = [Execution(model_config=model_config, config=config, ranks=ranks, role=role) for role in roles]
    jobs = [replace(each, layers=layers) for each in executions for layers in each.layers_to_execute()]
    try:
        found = in_forks(
            Execution.run, {number: (job,) for number, job in enumerate(jobs)}, processes, "parts of the trainer"
        )
    except ForkEnded as error:
        raise UnsupportedEnvironment(
            f"the process that measures the trainer's {jobs[error.number].role} ended with exit code {error.code}; if that is -9,"
            " this machine may have too little memory for so many processes at once: allow fewer cores (taskset)"
        ) from None
    by_role: dict[Role, list[TrainerPeaks]] = {role: [] for role in roles}
    for number, job in enumerate(jobs):
        by_role[job.role].append(found[number])
    return {each.role: trainer_peaks(each, by_role[each.role]) for each in executions}


def gpu_memory(
    config: Config,
    gpu_gib: float,
    names: TrainerNames,
    groups: Sequence[FusingGroup],
    ranks: Sequence[EngineRank],
    peaks: Mapping[Role, TrainerPeaks],
) -> GpuMemory:
    """Return what the fullest GPU of a run holds. ranks: of one engine."""
    shards = names.shards(ParallelDims.of(config.parallel).world_size)
    buckets = plan_buckets(groups, shards, config.weights.bucket_size_mib * MIB)
    shares = Shares(
        engine=engine_shares(config, ranks),
        trainers={role: trainer_share(each) for role, each in peaks.items()},
        bucket_bytes=max(each.nbytes for each in buckets),
        copy_bytes=names.copy_bytes(shards),
    )
    return GpuMemory(config, int(gpu_gib * GIB), shares)


def trainer_share(peaks: TrainerPeaks) -> TrainerShare:
    # `update` counts gradients too, which the estimate names as a part of their own.
    computing = {COMPUTING: max(0, peaks.update - peaks.parameters)}
    optimizer = {"AdamW's temporaries": peaks.optimizer}
    return TrainerShare(
        parameters=peaks.parameters,
        log_probs={COMPUTING: peaks.forward},
        update=max(computing, optimizer, key=lambda parts: sum(parts.values())),
    )


def engine_shares(config: Config, ranks: Sequence[EngineRank]) -> list[EngineShare]:
    """Return what the rank with most weights of each stage holds, and the KV cache of one token."""
    arguments = engine_arguments(config)
    shares = []
    for stage in range(config.parallel.pp):
        held = ranks[stage * config.parallel.tp : (stage + 1) * config.parallel.tp]
        layers = sorted(set().union(*(each.held_layers for each in held)))
        weights = max(each.nbytes + each.derived_bytes for each in held)
        cache = kv_cache(arguments, held[0])
        shares.append(
            EngineShare(
                stage,
                layers[0] if layers else 0,
                layers[-1] if layers else -1,
                weights,
                cache.token_bytes(arguments.get("swa_full_tokens_ratio")),
                cache.state_ratio,
                cache.unknown,
            )
        )
    return shares


def kv_cache(arguments: Mapping[str, Any], rank: EngineRank) -> KvCache:
    """Return the KV cache of one token on a rank, as SGLang counts it. arguments: the engine's, of a run.

    It is unknown if one of the arguments makes SGLang size its memory pools by another rule.
    """
    asked = str(arguments.get("kv_cache_dtype") or "auto")
    kind = {"bf16": "bfloat16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}.get(asked, asked)
    found = rank.kv_caches.get(kind) or KvCache(unknown=f'with engine.args.kv_cache_dtype = "{asked}"')
    others = [name for name in (*OTHER_RULES, *(WINDOW_RULES if found.window else ())) if arguments.get(name)]
    others += [name for name in STATE_RULES if found.state_ratio and arguments.get(name)]
    return KvCache(unknown=f"with engine.args.{others[0]}") if others else found
