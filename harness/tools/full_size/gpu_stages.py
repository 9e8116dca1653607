"""What one GPU holds in each stage of a step, and whether it fits. The order of a step is harness/ppo.py's.

Engine and trainer have told what each of them holds (`whole_run.py`). Here it is added up, stage by stage: what is
released or offloaded in a stage is not on the GPU, and what mem_fraction_static leaves beside the engine's weights is
its KV cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import wrap
from typing import Any, Literal

from harness.config.schema import Config
from harness.rollout.engine_settings import engine_defaults
from harness.runtime import GIB, MIB

CONTEXT_BYTES = GIB // 2
"""A CUDA context. The trainer and the scheduler have one each when the engine starts. Assumed."""
BESIDE_BYTES = 5.7 * GIB
"""CUDA contexts, NCCL's buffers and what SGLang keeps when it is released, for trainer and scheduler together.

Measured after a step of configs/gpu/memory_7b.toml (4 H200, sglang 0.5.17, torch 2.11): 14.6 GiB were in use, of which
this is neither parameters nor buffers of the sync.
"""
BESIDE, KV_CACHE = "CUDA, NCCL, SGLang", "engine: KV cache"
KV_AT_MOST, STATES = "engine: KV cache, at most", "engine: linear attention"
WEIGHTS, FP8_COPY = "engine: weights", "actor: FP8 copy to send"
WIDTH = 120

Role = Literal["actor", "critic", "reference"]
Parts = dict[str, int]


@dataclass(frozen=True, slots=True)
class EngineShare:
    """One pipeline stage on one GPU, in bytes: its weights, and the KV cache of one token."""

    stage: int
    first_layer: int
    last_layer: int
    weights: int
    kv_token: int
    state_ratio: float = 0.0
    """What SGLang keeps for states of linear attention or Mamba, in multiples of the KV cache."""
    kv_unknown: str = ""
    """Why the KV cache of a token is not known; "" if it is."""

    def room(self, static_bytes: int) -> int:
        """Return how many tokens have room in what the weights leave of static_bytes."""
        return int((static_bytes - self.weights) / (1 + self.state_ratio)) // self.kv_token

    def states(self, static_bytes: int) -> int:
        """Return the bytes of states: SGLang divides what the weights leave by the ratio, and makes as many as have
        room.
        """
        return max(0, int((static_bytes - self.weights) * self.state_ratio / (1 + self.state_ratio)))

    def least_static(self, tokens: int) -> int:
        """Return the static bytes with which so many tokens have room."""
        return self.weights + int(tokens * self.kv_token * (1 + self.state_ratio))


@dataclass(frozen=True, slots=True)
class TrainerShare:
    """One model on one rank, in bytes. Gradients, and each of AdamW's two moments, are as large as the parameters."""

    parameters: int
    log_probs: Parts
    """What a forward without gradient holds at most, beside the parameters."""
    update: Parts
    """What an update holds at most, beside parameters, gradients and moments."""


@dataclass(frozen=True, slots=True)
class Shares:
    """What the parts of a run hold, from which the stages of a step are added up."""

    engine: list[EngineShare]
    """Of each pipeline stage."""
    trainers: dict[Role, TrainerShare]
    bucket_bytes: int
    """The largest bucket of a sync."""
    copy_bytes: int = 0
    """What a trainer rank keeps between syncs of the actor's weights in the engine's precision, if that is another
    one."""


def engine_arguments(config: Config) -> dict[str, Any]:
    """Return the engine's arguments on a GPU, as far as the config decides them."""
    return {**engine_defaults("cuda", config.engine.preset), **config.engine.args}


def longest_sequence(config: Config) -> int:
    """Return the most tokens that a prompt and its response can have."""
    return config.task.max_prompt_tokens + config.rollout.max_response_tokens


class GpuMemory:
    """The GPU of the rank that has most, in bytes, on GPUs that no other process uses.

    stages: the times of a step at which memory is at its height. problems: why it does not fit.
    """

    def __init__(self, config: Config, gpu_bytes: int, shares: Shares) -> None:
        parallel = config.parallel
        self.config, self.gpu_bytes, self.shares = config, gpu_bytes, shares
        self.engine, self.trainers, self.bucket_bytes = shares.engine, shares.trainers, shares.bucket_bytes
        self.arguments = engine_arguments(config)
        self.ranks = parallel.dp * parallel.tp * parallel.pp
        self.is_cast = config.model.dtype != config.model.master_dtype
        processes = 2 if parallel.colocate else 1  # on one GPU
        self.beside = int(BESIDE_BYTES * processes / 2)
        # SGLang takes the fraction of what is free when the engine starts, which is before the trainer is built.
        self.fraction, self.usable = float(self.arguments["mem_fraction_static"]), gpu_bytes - processes * CONTEXT_BYTES
        self.static_bytes = int(self.fraction * self.usable)
        self.tokens = longest_sequence(config)
        self.kv_unknown = next((each.kv_unknown for each in self.engine if each.kv_unknown), "")
        # The stage with the least room decides for all; one without a layer caches nothing.
        rooms = [each.room(self.static_bytes) for each in self.engine if each.kv_token]
        room = min(rooms, default=self.tokens)
        self.kv_tokens = max(0, min(room, int(self.arguments.get("max_total_tokens") or room)))
        self.stages = dict(self._stages())
        self.problems = [*self._engine_problems(), *self._overfull()]
        self.fits = not self.problems

    def _stages(self) -> Iterator[tuple[str, Parts]]:
        if self.config.parallel.colocate:
            kv_cache = self.config.memory.resume == "all"
            yield "sync", self._stage(engine=self._engine(kv_cache)) | self._sync_parts()
            yield "generate", self._stage(active=(), engine=self._engine(kv_cache=True))
        else:
            received = {"sync: bucket received": self.bucket_bytes}
            yield "engine's GPU", {BESIDE: self.beside} | self._engine(kv_cache=True) | received
            yield "sync", self._stage() | self._sync_parts()
        for name, role in (("log_probs", "actor"), ("reference", "reference"), ("values", "critic")):
            if role in self.trainers:
                yield name, self._stage(active=(role,)) | self.trainers[role].log_probs
        for role in ("critic", "actor"):
            if role in self.trainers:
                yield f"update_{role}", self._stage(active=(role,), learning=role) | self.trainers[role].update

    def _stage(
        self, active: tuple[Role, ...] = ("actor",), learning: Role | None = None, engine: Parts | None = None
    ) -> Parts:
        """Return what stays on a trainer's GPU in a stage.

        active: models whose parameters are there even if they are offloaded. engine: what of it is resumed.
        """
        memory = self.config.memory
        if engine is None:
            saver = self.arguments.get("enable_memory_saver") or not self.config.parallel.colocate
            engine = {} if saver else self._engine(kv_cache=True)  # without the memory saver nothing is ever released
        parts = {BESIDE: self.beside, **engine}
        if self.shares.copy_bytes:
            parts[FP8_COPY] = self.shares.copy_bytes  # never offloaded
        for role, share in self.trainers.items():
            if role in active or role not in memory.offload_parameters:
                parts[f"{role}: parameters"] = share.parameters
            if role != "reference" and (role == learning or role not in memory.offload_optimizer):
                parts[f"{role}: AdamW states"] = 2 * share.parameters
            if role == learning:
                parts[f"{role}: gradients"] = share.parameters
        return parts

    def _sync_parts(self) -> Parts:
        transport = self.config.weights.transport
        if transport == "pull":
            return {}
        both = self.config.parallel.colocate and transport != "disk"
        parts = {f"sync: {'bucket, gathered and sent' if both else 'bucket gathered'}": self.bucket_bytes * (1 + both)}
        return parts | ({"sync: own rows, cast": self.bucket_bytes // self.ranks} if self.is_cast else {})

    def _cache_parts(self, share: EngineShare) -> Parts:
        """Return what a rank of a stage keeps of the sequences that it generates.

        Where the KV cache of a token is not known, that is all that mem_fraction_static leaves beside the weights:
        SGLang never takes more.
        """
        if self.kv_unknown:
            return {KV_AT_MOST: max(0, self.static_bytes - share.weights)}
        states = {STATES: share.states(self.static_bytes)} if share.state_ratio else {}
        return {KV_CACHE: self.kv_tokens * share.kv_token} | states

    def _engine(self, kv_cache: bool) -> Parts:
        """Return the share of the pipeline stage that has most."""
        weights = max(share.weights for share in self.engine)
        if not kv_cache:
            return {WEIGHTS: weights}
        held = {share: self._cache_parts(share) for share in self.engine}
        fullest = max(held, key=lambda share: share.weights + sum(held[share].values()))
        (cache, nbytes), *states = held[fullest].items()
        return {WEIGHTS: weights, cache: nbytes - (weights - fullest.weights), **dict(states)}

    def _engine_problems(self) -> Iterator[str]:
        weights = max(share.weights for share in self.engine)
        held = f"its weights take {size(weights)} of each GPU, and mem_fraction_static = {self.fraction:g} leaves"
        if self.kv_unknown and weights >= self.static_bytes:
            yield f"the engine has no room for a KV cache: {held} {size(self.static_bytes)} for both."
        if not self.kv_unknown and self.kv_tokens < self.tokens:
            least = max(share.least_static(self.tokens) for share in self.engine) / max(1, self.usable)
            remedy = f"set it to {least:.3f} or more" if least < 1 else "no value is enough: raise parallel.tp or pp"
            yield (
                f"the engine has room for {self.kv_tokens} tokens, but a prompt with its response may take {self.tokens}:"
                f" {held} {size(self.static_bytes)} for weights and KV cache; {remedy}."
            )

    def _overfull(self) -> Iterator[str]:
        for name, parts in self.stages.items():
            over = sum(parts.values()) - self.gpu_bytes
            if over <= 0:
                continue
            part, nbytes = max(parts.items(), key=lambda item: item[1])
            remedy = ""
            if parts.get(KV_CACHE, 0) + parts.get(STATES, 0) + parts.get(KV_AT_MOST, 0) > over:
                largest = (self.static_bytes - over) / self.usable - 0.0005  # rounded down
                remedy = f"; with mem_fraction_static up to {largest:.3f} it would fit"
            yield (
                f"{name} needs {size(self.gpu_bytes + over)}, {size(over)} more than there is; the largest part is"
                f" {part}, {size(nbytes)}{remedy}."
            )

    def as_lines(self) -> list[str]:
        """Return what the engine has room for, and a table with a column for each stage."""
        return [
            f"Memory of the fullest GPU in GiB, of {self.gpu_bytes / GIB:g} (--gpu-memory-gib). Executed on fake tensors: a rank's"
            f" shards are {size(self.trainers['actor'].parameters)}.",
            *_sentence(self._engine_sentence()),
            "",
            *self._table({name: sum(parts.values()) for name, parts in self.stages.items()}),
            f"  Not executed: {BESIDE}, which were measured once, on 4 H200. Not counted: fragments of torch's allocator.",
            "",
        ]

    def table(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"fits": self.fits, "problems": self.problems, "stages": self.stages}

    def verdict(self) -> str:
        """Return whether it fits, and how much room the fullest stage leaves."""
        totals = {name: sum(parts.values()) for name, parts in self.stages.items()}
        fullest = max(totals, key=lambda name: totals[name])
        if not self.fits:
            return "it does NOT fit"
        leaves = f"{fullest} is the fullest stage and leaves {size(self.gpu_bytes - totals[fullest])}"
        if self.kv_unknown:
            return (
                f"it fits, if a prompt with its response has room in the KV cache, which is not known; {leaves} or more"
            )
        return f"it fits; {leaves}"

    def _engine_sentence(self) -> str:
        parts = [
            (f"stage {share.stage} (layers {share.first_layer}-{share.last_layer}): " if len(self.engine) > 1 else "")
            + f"weights {size(share.weights)}, {_cache_words(share)}"
            for share in self.engine
        ]
        room = "" if self.kv_unknown else f", room for {self.kv_tokens:,} tokens"
        return (
            f"engine, each rank: {'; '.join(parts)}; mem_fraction_static = {self.fraction:g} is {size(self.static_bytes)} for"
            f" both{room}"
        )

    def _table(self, totals: Parts) -> list[str]:
        names = dict.fromkeys(name for parts in self.stages.values() for name in parts)
        rows = [["", *self.stages]]
        rows += [
            [name, *(_cell(parts[name]) if name in parts else "-" for parts in self.stages.values())] for name in names
        ]
        rows.append(["TOTAL", *map(_cell, totals.values())])
        fits = ("fits" if total <= self.gpu_bytes else "DOES NOT" for total in totals.values())
        rows.append([f"of {_cell(self.gpu_bytes)}", *fits])
        label, widths = max(map(len, names)), [max(len(name), 8) for name in self.stages]
        cells = ["".join(f"  {cell:>{wide}}" for cell, wide in zip(row[1:], widths, strict=True)) for row in rows]
        return [f"  {row[0]:<{label}}{each}" for row, each in zip(rows, cells, strict=True)]


def size(nbytes: float) -> str:
    """Format bytes with a unit: GiB, or MiB where GiB would show little more than zeros."""
    if 0 < nbytes < 16 * MIB:
        return f"{nbytes / MIB:.1f} MiB"
    return f"{nbytes / GIB:.{1 if nbytes >= GIB else 2 if nbytes else 0}f} GiB"


def _cache_words(share: EngineShare) -> str:
    """Return what one token takes of a rank."""
    if share.kv_unknown:
        return f"KV cache not known for this architecture ({share.kv_unknown})"
    states = (
        f", and {share.state_ratio:g} times the KV cache for states of linear attention" if share.state_ratio else ""
    )
    return f"KV cache {share.kv_token:,} bytes for each token{states}"


def _cell(nbytes: float) -> str:
    """Format bytes for the table, whose unit is GiB unless a cell says MiB."""
    return size(nbytes).removesuffix(" GiB")


def _sentence(text: str) -> list[str]:
    return wrap(text, WIDTH - 2, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
