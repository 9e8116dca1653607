"""Estimate the memory of one GPU in each stage of a step, and whether it fits. The order of a step is harness/ppo.py's.

Engine, as of sglang 0.5.20: the vocabulary is padded to a multiple of 64, key-value heads are repeated where there are fewer
than ranks, and MLA keeps kv_b_proj twice. Trainer: FSDP2 gives every rank the same number of rows and pads the last ones, so
that 256 experts on 512 ranks take twice their bytes. launch/full_size.py has SGLang and the trainer answer instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from textwrap import wrap
from typing import Any, Literal

from harness.config.fp8_rules import BLOCK
from harness.config.model_fields import model_fields
from harness.config.schema import Config, Updates
from harness.rollout.defaults import engine_defaults
from harness.runtime.units import GIB, MIB
from harness.tools.plan.model_shapes import LayerShape, ModelShape, UnknownShape, model_shape

VOCAB_PADDING = 64
FLOAT32_BYTES = 4
SCALE_BYTES = FLOAT32_BYTES / BLOCK**2
"""Of one element's share of the scale of its block."""
FP8_BYTES = 1 + SCALE_BYTES
CONTEXT_BYTES = GIB // 2
"""A CUDA context. The trainer and the scheduler have one each when the engine starts. Assumed."""
BESIDE_BYTES = 5.7 * GIB
"""CUDA contexts, NCCL's buffers and what SGLang keeps when it is released, for trainer and scheduler together.

Measured after a step of configs/gpu/memory_7b.toml (4 H200, sglang 0.5.17, torch 2.11): 14.6 GiB were in use, of which this
is neither parameters nor buffers of the sync.
"""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
BESIDE, KV_CACHE = "CUDA, NCCL, SGLang", "engine: KV cache"
KV_AT_MOST, STATES = "engine: KV cache, at most", "engine: linear attention"
WEIGHTS, FP8_COPY = "engine: weights", "actor: FP8 copy to send"
GATHERED, ADAMW = "FSDP2: layers gathered", "AdamW's temporaries"
NOTES = (
    "not counted: activations inside a layer, fragments of torch's allocator, what SGLang computes with (it takes that from"
    " the rest of the GPU, 1 - mem_fraction_static), what weights.verify = bytes or full needs, other users of the GPU.",
    f"{BESIDE}: contexts, buffers and what SGLang does not free; {BESIDE_BYTES / GIB:.1f} GiB in the one run in which it was"
    " measured (4 H200).",
    "engine.args that change how SGLang cuts or stores weights are not counted, nor is a draft model.",
)
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
        """Return the bytes of states: SGLang divides what the weights leave by the ratio, and makes as many as have room."""
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

    parameters: int
    """Elements of the model."""
    engine: list[EngineShare]
    """Of each pipeline stage."""
    trainers: dict[Role, TrainerShare]
    bucket_bytes: int
    """The largest bucket of a sync."""
    copy_bytes: int = 0
    """What a trainer rank keeps between syncs of the actor's weights in the engine's precision, if that is another one."""


def stage_layers(layers: int, pp: int) -> list[range]:
    """Return the decoder layers of each stage, as SGLang divides them: the last stages get the remaining layers."""
    base, rest = divmod(layers, pp)
    starts = [stage * base + max(0, stage - (pp - rest)) for stage in range(pp + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def engine_shares(
    model: ModelShape, tp: int, pp: int, weight_bytes: int, kv_bytes: int, quantized_bytes: float | None = None
) -> list[EngineShare]:
    """Return the share of each pipeline stage; its tp ranks hold the same. weight_bytes, kv_bytes: of one element.

    quantized_bytes: of one that block-FP8 quantizes, with its share of a scale; None: as of the others.
    """
    quantized_bytes = quantized_bytes or weight_bytes
    vocabulary = -(-model.vocab_size // VOCAB_PADDING) * VOCAB_PADDING * model.hidden_size // tp
    kv_heads = 1 if model.is_mla else max(1, model.kv_heads // tp)
    shares = []
    for stage, layers in enumerate(stage_layers(len(model.layers), pp)):
        quantized = sum(_quantized_in_engine(model.layers[layer], model, tp) for layer in layers)
        # SGLang keeps what MLA absorbs in 16 bits.
        others = sum(model.layers[layer].absorbed // tp + model.layers[layer].router for layer in layers)
        others += vocabulary * ((stage == 0) + (stage == pp - 1 and (pp > 1 or not model.is_tied)))
        kv_token = kv_heads * model.kv_width * len(layers) * kv_bytes
        held = int(quantized * quantized_bytes) + others * weight_bytes
        shares.append(EngineShare(stage, layers.start, layers.stop - 1, held, kv_token))
    return shares


def _quantized_in_engine(layer: LayerShape, model: ModelShape, tp: int) -> int:
    """Return the elements of a layer on one rank that block-FP8 quantizes."""
    key_value = layer.key_value * max(1, model.kv_heads // tp) // model.kv_heads
    return (layer.split + layer.experts) // tp + key_value + layer.whole - layer.router


def copy_bytes(model: ModelShape, ranks: int) -> int:
    """Return the bytes of the FP8 copy on the fullest of the trainer's ranks.

    Experts go to ranks whole, with their scales. Other matrices may be cut within a block, so each rank has all their scales.
    """
    experts = sum(layer.experts for layer in model.layers)
    others = sum(layer.quantized for layer in model.layers) - experts
    return int((_padding(model, ranks) * experts * FP8_BYTES + others) / ranks + others * SCALE_BYTES)


def _padding(model: ModelShape, ranks: int) -> float:
    """Return how many times the bytes of all experts the ranks take: FSDP2 gives each rank as many as the first."""
    return -(-model.experts // ranks) * ranks / model.experts if model.experts else 1.0


def trainer_share(
    model: ModelShape,
    ranks: int,
    master: int,
    compute: int,
    *,
    tokens: int = 0,
    head: bool = True,
) -> TrainerShare:
    """Return the share of a model with a language model's head, or with the single row of a value head.

    master: bytes of an element in shards, gradients and moments. compute: gathered, and in activations. tokens: of one
    microbatch. FSDP2 gathers the experts of a layer by themselves, and the rest of it, into a flat buffer that it then copies
    out. In a backward the next unit's buffer, the unit's gradients, and their float32 copies come on top.
    """
    padding = _padding(model, ranks)
    experts = max(int(padding * layer.experts) for layer in model.layers)
    rest = max(layer.elements - layer.experts for layer in model.layers)
    held = sum(layer.elements + int((padding - 1) * layer.experts) for layer in model.layers)
    outside = model.vocab_size * model.hidden_size * (2 if head and not model.is_tied else 1)
    largest = max(experts, rest)
    cast = largest // ranks * compute if master != compute else 0
    forward = (2 * largest + min(experts, rest)) * compute + cast + outside * compute
    of_experts = (compute + FLOAT32_BYTES) * experts + 2 * compute * rest
    of_rest = (3 * compute + FLOAT32_BYTES) * rest
    backward = max(of_experts, of_rest) + cast + 2 * outside * compute
    # Logits, their float32 copy at temperature, and for the entropy the softmax, another copy and their product.
    logits = {"logits": tokens * model.vocab_size * (compute + 4 * FLOAT32_BYTES)} if head else {}
    gathered = {GATHERED: outside * compute}
    inputs = tokens * model.hidden_size * len(model.layers) * compute
    kept = {"layers' inputs kept": inputs}
    parameters = (held + outside) // ranks * master
    return TrainerShare(
        parameters=parameters,
        log_probs=_larger({GATHERED: forward}, gathered | logits),
        update=_larger({GATHERED: backward} | kept, gathered | logits | kept, {ADAMW: parameters}),
    )


def formula_shares(config: Config) -> Shares:
    """Return the shares by the fields of the model's config.json. Raise UnknownShape, see MemoryEstimate."""
    parallel, name = config.parallel, config.model.name
    fields = model_fields(name, config.model.overrides, "cuda")
    if fields is None:
        raise UnknownShape(f'model.name = "{name}" is on the hub, and not in the cache of this machine')
    model = model_shape(fields)
    arguments = engine_arguments(config)
    element, master = DTYPE_BYTES[config.model.dtype], DTYPE_BYTES[config.model.master_dtype]
    ranks = parallel.dp * parallel.tp * parallel.pp
    kv_bytes = 1 if str(arguments.get("kv_cache_dtype")).startswith("fp8") else element
    quantized = FP8_BYTES if config.model.rollout_precision == "fp8_block" else None

    def share(updates: Updates, master: int, head: bool = True) -> TrainerShare:
        return trainer_share(model, ranks, master, element, tokens=microbatch_tokens(config, updates), head=head)

    trainers: dict[Role, TrainerShare] = {"actor": share(config.actor, master)}
    if config.algorithm.has_critic:
        trainers["critic"] = share(config.critic, master, head=False)
    if config.algorithm.kl_placement != "none":
        trainers["reference"] = share(config.actor, element)
    return Shares(
        parameters=model.parameters,
        engine=engine_shares(model, parallel.tp, parallel.pp, element, kv_bytes, quantized),
        trainers=trainers,
        bucket_bytes=largest_bucket(model, ranks, element, config.weights.bucket_size_mib * MIB, quantized),
        copy_bytes=copy_bytes(model, ranks) if quantized else 0,
    )


def engine_arguments(config: Config) -> dict[str, Any]:
    """Return the engine's arguments on a GPU, as far as the config decides them."""
    return {**engine_defaults("cuda", config.engine.preset), **config.engine.args}


def microbatch_tokens(config: Config, updates: Updates) -> int:
    """Return the most tokens that a rank computes at a time."""
    return updates.tokens_per_microbatch or updates.microbatch_size * longest_sequence(config)


def longest_sequence(config: Config) -> int:
    """Return the most tokens that a prompt and its response can have."""
    return config.task.max_prompt_tokens + config.rollout.max_response_tokens


def largest_bucket(
    model: ModelShape, ranks: int, dtype_bytes: int, limit_bytes: int, quantized_bytes: float | None = None
) -> int:
    """Return the bytes of the largest bucket: the limit, or what cannot be split: the embedding, one expert of each rank.

    quantized_bytes: as in engine_shares.
    """
    quantized_bytes = quantized_bytes or dtype_bytes
    expert = max(layer.experts for layer in model.layers) // model.experts * 2 // 3 if model.experts else 0
    # An expert and its scales are sent apart.
    whole = max(model.vocab_size * model.hidden_size * dtype_bytes, expert * ranks * int(quantized_bytes))
    quantized = sum(layer.quantized for layer in model.layers)
    sent = int(quantized * quantized_bytes) + (model.parameters - quantized) * dtype_bytes
    return max(whole, min(limit_bytes, sent))


class MemoryEstimate:
    """The GPU of the rank that has most, in bytes, on GPUs that no other process uses.

    stages: the times of a step at which memory is at its height. problems: why it does not fit.
    """

    def __init__(self, config: Config, gpu_bytes: int, shares: Shares | None = None) -> None:
        """shares: as measured otherwise; None for those of formula_shares.

        Raise UnknownShape if the model is not on this machine, or its architecture is not known here.
        """
        parallel = config.parallel
        self.shares = shares or formula_shares(config)
        self.config, self.gpu_bytes = config, gpu_bytes
        self.engine, self.trainers, self.bucket_bytes = (
            self.shares.engine,
            self.shares.trainers,
            self.shares.bucket_bytes,
        )
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

    def cache_parts(self, share: EngineShare) -> Parts:
        """Return what a rank of a stage keeps of the sequences that it generates.

        Where the KV cache of a token is not known, that is all that mem_fraction_static leaves beside the weights: SGLang never
        takes more.
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
        held = {share: self.cache_parts(share) for share in self.engine}
        fullest = max(held, key=lambda share: share.weights + sum(held[share].values()))
        (cache, nbytes), *states = held[fullest].items()
        return {WEIGHTS: weights, cache: nbytes - (weights - fullest.weights), **dict(states)}

    def _engine_problems(self) -> Iterator[str]:
        weights = max(share.weights for share in self.engine)
        held = f"its weights take {size(weights)} of each GPU, and mem_fraction_static = {self.fraction:g} leaves"
        if self.kv_unknown and weights >= self.static_bytes:
            yield f"the engine has no room for a KV cache: {held} {size(self.static_bytes)} for both."
        if not self.kv_unknown and self.kv_tokens < self.tokens:
            least = max(share.least_static(self.tokens) for share in self.engine) / self.usable
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

    def as_lines(self, source: str) -> list[str]:
        """Return a table with a column for each stage, the verdict and the notes, in at most WIDTH columns.

        source: where the GPU's size comes from, as the end of a sentence.
        """
        return [
            f"Memory of each GPU in GiB, estimated for {size(self.gpu_bytes)} ({source})",
            *_sentence(f"model: {self.shares.parameters:,} weights without norms and biases ({self._precision()})"),
            *self.table_lines(),
            "",
            f"VERDICT: {self.verdict()}",
            *(line for number, each in enumerate(self.problems, 1) for line in _sentence(f"{number}. {each}", "     ")),
            *(line for note in (*self._activations(), *NOTES) for line in _sentence(f"- {note}")),
        ]

    def _activations(self) -> tuple[str, ...]:
        """Return a note on the learners whose activations are all kept: of these only a part is counted."""
        learners = ("actor", "critic") if self.config.algorithm.has_critic else ("actor",)
        keep_all = [role for role in learners if not getattr(self.config, role).gradient_checkpointing]
        if not keep_all:
            return ()
        return (
            f"{' and '.join(keep_all)} keep every activation of a microbatch until the backward pass, because gradient_checkpointing"
            " is off; only the layers' inputs are counted, so updates take more. launch/full_size.py counts them all.",
        )

    def _precision(self) -> str:
        model = self.config.model
        if model.rollout_precision == "same":
            return model.dtype
        return f"{model.dtype}; in the engine {model.rollout_precision}"

    def table_lines(self) -> list[str]:
        """Return what the engine has room for, and a table with a column for each stage."""
        totals = {name: sum(parts.values()) for name, parts in self.stages.items()}
        return [*_sentence(self._engine_sentence()), "", *self._table(totals)]

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


def _larger(*alternatives: Parts) -> Parts:
    """Return the largest of parts that are never there at once."""
    return max(alternatives, key=lambda parts: sum(parts.values()))


def _sentence(text: str, indent: str = "    ") -> list[str]:
    return wrap(text, WIDTH - 2, initial_indent="  ", subsequent_indent=indent, break_on_hyphens=False)
