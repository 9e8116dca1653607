"""A whole run at the model's true size: what each GPU holds in each stage of a step, and what a weight sync moves.

Engine and trainer answer by their own code (`ranks_at_true_size.py`, `trainer_memory.py`). SGLang's own code counts
the KV cache of one token. What CUDA, NCCL and SGLang keep beside is not executed, but a number that was measured once
(`gpu_stages.py`).
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from harness.cluster.mesh import ParallelDims
from harness.config.engine_rules import choose_transport
from harness.config.layers import ConfigError
from harness.config.schema import Config, TransportName
from harness.runtime import GIB, MIB
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.engine_class.meta_kv_cache import KvCache
from harness.tools.full_size.forks import ForkEnded, in_forks
from harness.tools.full_size.gpu_stages import (
    BESIDE,
    FP8_COPY,
    WEIGHTS,
    EngineShare,
    GpuMemory,
    Shares,
    TrainerShare,
    engine_arguments,
    size,
)
from harness.tools.full_size.ranks_at_true_size import NO_LAYER, EngineRank, by_layer
from harness.tools.full_size.sync_plan import TRANSPORTS, Rates, RunShape, SyncPlan, SyncPlanner
from harness.tools.full_size.trainer_memory import Execution, Role, TrainerPeaks, trainer_peaks
from harness.tools.full_size.trainer_names import TrainerNames, trainer_class
from harness.trainer.rows import RowShards
from harness.weights.fusing import FusingGroup

COMPUTING = "gathered layers, activations"
"""A part of a stage: what executing it on fake tensors counted, beside what the other parts name."""
OTHER_RULES = ("enable_hisparse", "enable_unified_memory", "enable_kv_cache_sharding", "dcp_size")
"""Arguments with which SGLang sizes its pools by rules that are not known here."""
WINDOW_RULES = ("disable_hybrid_swa_memory", "max_running_requests")
"""Further ones, for a model with sliding windows."""
STATE_RULES = ("max_mamba_cache_size", "mamba_full_memory_ratio", "max_running_requests", "speculative_algorithm")
"""Further ones, for a model with states of linear attention."""
GPU_RATE = 1.21e12
"""Bytes in a second that a rank's pull copied out of its own GPU: one H200, sglang 0.5.17, tp 1, 15.2 GB in 0.0151 s,
less the waits of a pull."""
NVLINK_RATE = 337e9
"""Bytes in a second that a rank received from its peers in a pull over NVLink: 4 H200, sglang 0.5.17, dp 2 tp 2, 15.2
GB."""


@dataclass(frozen=True, kw_only=True)
class WholeRun:
    """What was found out about a run."""

    memory: GpuMemory
    transport: TransportName
    """The one of the run."""
    plans: Mapping[TransportName, SyncPlan]
    pairs: Sequence[Mapping[int, int]]
    """For each rank of one engine: trainer rank -> bytes that it needs of it."""
    peaks: Mapping[Role, TrainerPeaks]
    shape: RunShape
    own: Sequence[Mapping[str, int]]
    """For each rank: the parts of a stage that it holds in another amount than the fullest GPU may, see `own_parts`."""

    def gpu_stages(self, rank: int) -> dict[str, dict[str, int]]:
        """Return what a rank's GPU holds in each stage, by part; with an engine on other GPUs, the engine's stage is on
        those.

        What was executed (activations, AdamW's temporaries) is that of rank 0, and no rank has more.
        """
        own = self.own[rank]
        return {
            stage: {part: own.get(part, nbytes) for part, nbytes in parts.items()}
            for stage, parts in self.memory.stages.items()
        }

    def alike_gpus(self) -> list[list[int]]:
        """Return the ranks in groups whose GPUs hold the same in every stage."""
        groups: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
        for rank, own in enumerate(self.own):
            groups[tuple(sorted(own.items()))].append(rank)
        return list(groups.values())

    def as_lines(self, gpu_gib: float, rates: Rates) -> list[str]:
        """Return the tables of memory and of a sync."""
        peaks = self.peaks["actor"]
        return [
            f"Memory of the fullest GPU in GiB, of {gpu_gib:g} (--gpu-memory-gib). Executed on fake tensors: a rank's shards are"
            f" {size(peaks.parameters)}.",
            *self.memory.table_lines(),
            f"  Not executed: {BESIDE}, which were measured once, on 4 H200. Not counted: fragments of torch's allocator.",
            "",
            *self._sync_lines(rates),
            "",
        ]

    def sync_rows(self, rates: Rates) -> list[tuple[str, ...]]:
        """Return a row of text for each transport, below a row of titles. The run's own transport has a star."""
        rows: list[tuple[str, ...]] = [
            ("one sync, GB", "own GPU", "NVLink", "network in", "least", "staging", "messages", "seconds")
        ]
        for plan in self.plans.values():
            name = plan.transport + (" *" if plan.transport == self.transport else "")
            seconds = plan.seconds(rates)
            network = max(plan.network_in, default=0)
            numbers = (plan.same_gpu, plan.nvlink, network, plan.least_network, plan.staging)
            rows.append(
                (
                    name,
                    *(f"{each / 1e9:,.2f}" for each in numbers),
                    f"{plan.messages:,}",
                    f"{seconds:.3f}" if seconds else "-",
                )
            )
        return rows

    def _sync_lines(self, rates: Rates) -> list[str]:
        rows = self.sync_rows(rates)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(wide) if not at else cell.rjust(wide) for at, (cell, wide) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        ]  # fmt: skip
        return [
            *(f"  {line}" for line in lines),
            "  * this run's. own GPU, NVLink, staging: of the rank with most; network in: of the host with most; least: what any",
            "  transport must bring to that host; seconds: of the links alone" + ("" if rates.network else ", where their rates are known"),
        ]  # fmt: skip

    def table(self) -> dict[str, Any]:
        """Return what was found, for JSON."""
        return {
            "fits": self.memory.fits,
            "problems": self.memory.problems,
            "stages": {name: dict(parts) for name, parts in self.memory.stages.items()},
            "gpus": [{"ranks": ranks, "stages": self.gpu_stages(ranks[0])} for ranks in self.alike_gpus()],
            "sync": {
                name: {
                    "same_gpu": plan.same_gpu,
                    "nvlink": plan.nvlink,
                    "network_in": plan.network_in,
                    "network_out": plan.network_out,
                    "between_hosts": plan.between_hosts,
                    "least_network": plan.least_network,
                    "messages": plan.messages,
                    "staging": plan.staging,
                    "files": plan.files,
                }
                for name, plan in self.plans.items()
            },
            "bytes_by_pair": [{str(owner): nbytes for owner, nbytes in each.items()} for each in self.pairs],
        }


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


def examine_run(
    config: Config, nproc_per_node: int, gpu_gib: float, folder: Path, names: TrainerNames, groups: Sequence[FusingGroup],
    ranks: Sequence[EngineRank], peaks: Mapping[Role, TrainerPeaks],
) -> WholeRun:  # fmt: skip
    """Return what a run of this config would hold and move. ranks: of one engine."""
    dims = ParallelDims.of(config.parallel)
    shards = names.shards(dims.world_size)
    master = getattr(torch, config.model.master_dtype)
    shape, copies = RunShape(dims=dims, nproc_per_node=nproc_per_node), names.copy_bytes(dims.world_size)
    planner = SyncPlanner(
        shape=shape,
        layers=by_layer(groups),
        shards=shards,
        held=names.held(master),
        engine=ranks,
        bucket_bytes=config.weights.bucket_size_mib * MIB,
    )
    shares = Shares(
        engine=engine_shares(config, ranks),
        trainers={role: trainer_share(each) for role, each in peaks.items()},
        bucket_bytes=planner.largest_bucket,
        copy_bytes=max(copies),
    )
    memory = GpuMemory(config, int(gpu_gib * GIB), shares)
    return WholeRun(
        memory=memory,
        shape=shape,
        own=own_parts(memory, dims, ranks, missing_bytes(names, dims.world_size, master), copies),
        transport=choose_transport(config)[0],
        plans={name: planner.plan(name) for name in TRANSPORTS},
        pairs=planner.bytes_by_pair(),
        peaks=peaks,
    )


def own_parts(
    memory: GpuMemory,
    dims: ParallelDims,
    engine: Sequence[EngineRank],
    missing: Sequence[int],
    copies: Sequence[int] = (),
) -> list[dict[str, int]]:
    """Return for each rank the parts in which GPUs differ: the engine's weights and KV cache, AdamW's two moments,
    copies.

    copies: see TrainerNames.copy_bytes.

    Not the trainer's parameters and gradients: FSDP2 pads the storage of both, so that a rank without a row of a tensor
    still allocates what rank 0 does. Moments are made as large as the rows. missing: see `missing_bytes`.
    """
    found = []
    for rank in range(dims.world_size):
        number = dims.engine_rank(rank)
        held, share = engine[number], memory.engine[number // dims.tp]
        parts = {WEIGHTS: held.nbytes + held.derived_bytes} | memory.cache_parts(share)
        for role, trainer in memory.trainers.items():
            if role != "reference":
                parts[f"{role}: AdamW states"] = 2 * (trainer.parameters - missing[rank])
        if any(copies):
            parts[FP8_COPY] = copies[rank]
        found.append(parts)
    return found


def missing_bytes(names: TrainerNames, ranks: int, master: torch.dtype) -> list[int]:
    """Return for each trainer rank the bytes of rows that rank 0 holds more than it, by FSDP2's row rule.

    A critic has those of the actor, whose head of another size makes no difference worth a second model.
    """
    of_rows = Counter[int]()  # rows of a tensor -> elements of one row of all tensors that have as many
    for each in names.tensors.values():
        if isinstance(each, torch.nn.Parameter):
            of_rows[each.shape[0]] += each[0].numel()
    cuts = [RowShards(rows, elements, ranks) for rows, elements in of_rows.items()]
    return [
        sum((cut.chunk - len(cut.rows_of(rank))) * cut.row_elements for cut in cuts) * master.itemsize
        for rank in range(ranks)
    ]


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
        layers = sorted(set().union(*(each.held_layers for each in held)) - {NO_LAYER})
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
