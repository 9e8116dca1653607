"""Memory of one GPU in each stage of a step, and whether it fits.

The order of a step is harness/ppo.py's; what stays on the GPU between stages is what memory.offload_* does not name.

Engine, rules as of sglang 0.5.20: VocabParallelEmbedding pads the vocabulary to a multiple of 64; key-value heads are repeated
where there are fewer than ranks; norms, routers and MLA's low-rank down projections are whole on every rank; MLA keeps
kv_b_proj a second time, absorbed (w_kc, w_vc); experts are cut by number or by intermediate size, together tp ways;
get_pp_indices gives layers that remain to the last stages.

Trainer: fully_shard cuts a tensor's rows into equal chunks and pads the last ones, so that every rank keeps
ceil(rows / ranks) rows, though some use none: 256 experts on 512 ranks take twice their bytes. Gathered, a layer has its
padding too. Shares are of rank 0, which has most.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from textwrap import wrap
from typing import Any, Literal

from harness.config.schema import Config
from harness.rollout.defaults import engine_defaults
from harness.runtime.units import GIB, MIB
from harness.tools.plan.model_shapes import LM_HEAD, ModelShape, TensorShape, model_fields, model_shape

VOCAB_PADDING = 64
FLOAT32_BYTES = 4
REDUCE_BYTES = 4  # gradients are added up over ranks in float32 (harness/trainer/model.py)
ALIGNMENT = 256  # as in harness/weights/groups.py
CONTEXT_BYTES = GIB // 2
"""Of a CUDA context, of which trainer and scheduler have one each: taken when the engine starts. Assumed."""
BESIDE_BYTES = 5.7 * GIB
"""CUDA contexts, NCCL's buffers and what SGLang keeps when released, of trainer and scheduler together, after a step.

Of 14.6 GiB that were in use at the end of a step of configs/gpu/memory_7b.toml (4 H200, sglang 0.5.17, torch 2.11), what is
neither parameters of critic and reference nor the sync's buffers.
"""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
BESIDE, KV_CACHE, GATHERED = "CUDA, NCCL, SGLang", "engine: KV cache", "FSDP2: layers gathered"
NOTES = (
    "left out: layers' activations, fragments of torch's allocator, what SGLang computes with (1 - mem_fraction_static of the"
    " GPU is meant for that), what weights.verify = bytes or full needs, a pull's buffer for what other hosts send, other users"
    " of the GPU.",
    f"{BESIDE}: contexts, buffers, what SGLang does not free when released; {BESIDE_BYTES / GIB:.1f} GiB in the one run of 4"
    " H200 in which it was measured, more or less in others.",
    "experts are counted as transformers 5 holds them, a layer's in two tensors; FSDP2 gives each rank at least one row of a"
    " tensor, and a bucket has that of every rank, however small weights.bucket_size_mib is.",
    "the engine is SGLang's as of 0.5.20; engine.args that change how it cuts or stores weights are not counted.",
)
WIDTH = 120

Role = Literal["actor", "critic", "reference"]
Parts = dict[str, int]
"""What is on the GPU, in bytes."""


@dataclass(frozen=True, slots=True)
class EngineShare:
    """Weights, and KV cache of one token, of each rank of one pipeline stage."""

    stage: int
    first_layer: int
    last_layer: int
    weights: int
    kv_token: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerShare:
    """One model on one rank, in bytes. Parameters, gradients and AdamW's two moments are sharded, in the master dtype; each
    moment, and what AdamW over lists of tensors needs for a while, is of the size of the gradients.

    forward: the largest layer gathered, that is the flat buffer that all ranks' chunks arrive in and the parameters copied out
    of it; this rank's chunk cast for it, where the master dtype is wider; and what lies outside of the layers, gathered from
    the first of them to the last. backward: the same, the flat buffer being the next layer's; gradients of the layer and of
    what lies outside, and the layer before's float32 ones until they are reduced.
    """

    parameters: int
    gradients: int
    forward: int
    backward: int
    outside: int  # what lies outside of the layers, gathered: it is there while logits are computed


def kv_element_bytes(dtype_bytes: int, arguments: Mapping[str, Any]) -> int:
    """Return the bytes of one element of KV cache under these engine.args."""
    kv_dtype = str(arguments.get("kv_cache_dtype", "auto"))
    return 1 if kv_dtype.startswith("fp8") else 2 if kv_dtype in ("bfloat16", "bf16") else dtype_bytes


def stage_layers(layers: int, pp: int) -> list[range]:
    """Return the decoder layers of each stage; what remains goes to the last ones, one each."""
    base, rest = divmod(layers, pp)
    starts = [stage * base + max(0, stage - (pp - rest)) for stage in range(pp + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def engine_shares(model: ModelShape, tp: int, pp: int, weight_bytes: int, kv_bytes: int) -> list[EngineShare]:
    """Return the share of each pipeline stage; all its tp ranks hold as much. weight_bytes, kv_bytes: of one element."""
    shares = []
    for stage, layers in enumerate(stage_layers(model.layers, pp)):
        held = [tensor for tensor in model.tensors if _stage_has(tensor, stage, layers, pp)]
        if stage == pp - 1 and pp > 1 and not any(tensor.name == LM_HEAD for tensor in held):
            held.append(model.tensors[0])  # tied: the last stage has a copy of the embedding to compute logits with
        kv_heads = 1 if model.is_mla else max(1, model.kv_heads // tp)
        weights = sum(_engine_bytes(tensor, model, tp, weight_bytes) for tensor in held)
        kv_token = kv_heads * model.kv_width * len(layers) * kv_bytes
        shares.append(EngineShare(stage, layers.start, layers.stop - 1, weights, kv_token))
    return shares


def _stage_has(tensor: TensorShape, stage: int, layers: range, pp: int) -> bool:
    """Return whether a stage has the tensor: the embedding is on the first one, norm and head are on the last."""
    if tensor.layer is not None:
        return tensor.layer in layers
    return stage == (0 if tensor.cut == "vocab" and tensor.name != LM_HEAD else pp - 1)


def _engine_bytes(tensor: TensorShape, model: ModelShape, tp: int, weight_bytes: int) -> int:
    if tensor.is_buffer:
        return tensor.numel * FLOAT32_BYTES
    numel = -(-tensor.numel // tp)
    if tensor.cut == "whole":
        numel = tensor.numel
    elif tensor.cut == "vocab":
        padded = -(-model.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
        numel = -(-padded // tp) * (tensor.numel // model.vocab_size)
    elif tensor.cut == "kv_heads":
        numel = tensor.numel // model.kv_heads * max(1, model.kv_heads // tp)
    return numel * weight_bytes * (2 if tensor.name.endswith("kv_b_proj.weight") else 1)


def trainer_share(model: ModelShape, ranks: int, master: int, compute: int, head: bool = True) -> TrainerShare:
    """Return the share of a model with a language model's head, or else with a value head.

    master: bytes of an element in shards, gradients and moments; compute: gathered, and in activations.
    """
    groups = model.groups(head)
    *layers, rest = ([tensor for tensor in group if not tensor.is_buffer] for group in groups)
    own = sum(_chunk(tensor, ranks) for group in (*layers, rest) for tensor in group) * master
    buffers = sum(tensor.numel for group in groups for tensor in group if tensor.is_buffer) * FLOAT32_BYTES
    padded, real = max((_gathered(group, ranks), sum(tensor.numel for tensor in group)) for group in layers)
    outside = _gathered(rest, ranks) * compute
    cast = padded // ranks * compute if master != compute else 0
    return TrainerShare(
        parameters=own + buffers,
        gradients=own,
        forward=2 * padded * compute + cast + outside,
        backward=(2 * padded + real) * compute + cast + padded * REDUCE_BYTES + 2 * outside,
        outside=outside,
    )


def largest_bucket(model: ModelShape, ranks: int, dtype_bytes: int, limit_bytes: int) -> int:
    """Return the bytes of the largest bucket that harness/weights/gather.py would plan.

    What fuses stays together, padding of the trainer's ranks included; experts are split, but not below one row of every
    rank.
    """
    groups: dict[str, list[TensorShape]] = {}
    for tensor in model.tensors:
        groups.setdefault(tensor.name if tensor.cut == "experts" else tensor.name.rsplit(".", 2)[0], []).append(tensor)
    filled = largest = 0
    for group in groups.values():
        first = group[0]
        if first.cut != "experts":
            sizes = (t.numel * FLOAT32_BYTES if t.is_buffer else _chunk(t, ranks) * ranks * dtype_bytes for t in group)
            size = sum(map(_aligned, sizes))
            filled = size if filled and filled + size > limit_bytes else filled + size
            largest = max(largest, filled)
            continue
        row = ranks * (first.numel // first.shape[0]) * dtype_bytes
        left = -(-first.shape[0] // ranks)
        while left:
            room = (limit_bytes - filled) // row
            if room < 1 and filled:
                filled = 0
                continue
            taken = min(left, max(room, 1))
            filled, left = filled + _aligned(taken * row), left - taken
            largest = max(largest, filled)
    return largest


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _chunk(tensor: TensorShape, ranks: int) -> int:
    """Return the elements that every rank keeps of a tensor, padding included."""
    return -(-tensor.shape[0] // ranks) * (tensor.numel // tensor.shape[0])


def _gathered(group: Iterable[TensorShape], ranks: int) -> int:
    return sum(_chunk(tensor, ranks) for tensor in group) * ranks


class MemoryEstimate:
    """The GPU of the rank that has most, in bytes, for GPUs that no other process uses.

    stages: the times of a step when memory is at its height. problems: why it does not fit.
    """

    def __init__(self, config: Config, gpu_bytes: int) -> None:
        """Raise UnknownShape where the model's config is not known here."""
        parallel = config.parallel
        model = model_shape(model_fields(config.model.name, config.model.overrides, "cuda"))
        self.config, self.model, self.gpu_bytes = config, model, gpu_bytes
        self.arguments = {**engine_defaults("cuda", config.engine.defaults), **config.engine.args}
        self.element, master = DTYPE_BYTES[config.model.dtype], DTYPE_BYTES[config.model.master_dtype]
        self.casts = self.element != master
        self.ranks = parallel.dp * parallel.tp * parallel.pp
        processes = 2 if parallel.colocate else 1  # on one GPU
        self.beside = int(BESIDE_BYTES * processes / 2)
        kv_bytes = kv_element_bytes(self.element, self.arguments)
        self.engine = engine_shares(model, parallel.tp, parallel.pp, self.element, kv_bytes)
        # SGLang takes the fraction of what is free when the engine starts, which is before the trainer is built.
        self.fraction, self.usable = float(self.arguments["mem_fraction_static"]), gpu_bytes - processes * CONTEXT_BYTES
        self.static_bytes = int(self.fraction * self.usable)
        # The stage with least room decides for all, as SGLang has it; one without a layer caches nothing.
        room = min((self.static_bytes - each.weights) // each.kv_token for each in self.engine if each.kv_token)
        self.kv_tokens = max(0, min(room, int(self.arguments.get("max_total_tokens") or room)))
        self.trainers: dict[Role, TrainerShare] = {"actor": trainer_share(model, self.ranks, master, self.element)}
        if config.algorithm.has_critic:
            self.trainers["critic"] = trainer_share(model, self.ranks, master, self.element, head=False)
        if config.algorithm.kl_placement != "none":
            self.trainers["reference"] = trainer_share(model, self.ranks, self.element, self.element)
        self.bucket_bytes = largest_bucket(model, self.ranks, self.element, config.weights.bucket_size_mib * MIB)
        self.tokens = config.task.max_prompt_tokens + config.rollout.max_response_tokens
        self.stages = dict(self._stages())
        self.problems = [*self._engine_problems(), *self._overfull()]
        self.fits = not self.problems

    def _stages(self) -> Iterator[tuple[str, Parts]]:
        if self.config.parallel.colocate:
            yield "sync", self._stage("sync", engine=self._engine(kv_cache=self.config.memory.resume == "all"))
            yield "generate", self._stage("generate", active=(), engine=self._engine(kv_cache=True))
        else:
            received = {"sync: bucket received": self.bucket_bytes}
            yield "engine's GPU", {BESIDE: self.beside} | self._engine(kv_cache=True) | received
            yield "sync", self._stage("sync")
        # Logits, their float32 copy at temperature, and for the entropy the softmax, another copy and their product.
        size = self._microbatch_tokens("actor") * self.model.vocab_size
        logits = size * (self.element + 4 * FLOAT32_BYTES)
        yield "log_probs", self._stage("log_probs", passing=self._forward("actor", logits))
        if "reference" in self.trainers:
            passing = self._forward("reference", logits)
            yield "reference", self._stage("reference", active=("reference",), passing=passing)
        if "critic" in self.trainers:
            yield "update_critic", self._update("critic", 0)
        yield "update_actor", self._update("actor", logits)

    def _stage(
        self,
        name: str,
        active: tuple[Role, ...] = ("actor",),
        learning: Role | None = None,
        engine: Parts | None = None,
        passing: Parts | None = None,
    ) -> Parts:
        """Return what is on a trainer's GPU.

        active: roles whose parameters are there, offloaded or not. engine: what of it is resumed; without a memory saver all
        of it always is.
        """
        memory, weights, colocate = self.config.memory, self.config.weights, self.config.parallel.colocate
        if engine is None:
            saver = self.arguments.get("enable_memory_saver") or not colocate
            engine = {} if saver else self._engine(kv_cache=True)
        parts = {BESIDE: self.beside, **engine}
        for role, share in self.trainers.items():
            if role in active or role not in memory.offload_parameters:
                parts[f"{role}: parameters"] = share.parameters
            if role != "reference" and (role == learning or role not in memory.offload_optimizer):
                parts[f"{role}: AdamW states"] = 2 * share.gradients
            if role == learning:
                parts[f"{role}: gradients"] = share.gradients
        if name == "sync" and weights.transport != "pull":
            both = colocate and weights.transport != "disk"
            held = "bucket, gathered and sent" if both else "bucket gathered"
            parts[f"sync: {held}"] = self.bucket_bytes * (1 + both)
            if self.casts:
                parts["sync: own rows, cast"] = self.bucket_bytes // self.ranks
        return parts | (passing or {})

    def _engine(self, kv_cache: bool) -> Parts:
        """Return the share of the pipeline stage that has most."""
        weights = max(share.weights for share in self.engine)
        most = max(share.weights + self.kv_tokens * share.kv_token for share in self.engine)
        return {"engine: weights": weights} | ({KV_CACHE: most - weights} if kv_cache else {})

    def _forward(self, role: Role, logits: int) -> Parts:
        share = self.trainers[role]
        return _larger({GATHERED: share.forward}, {GATHERED: share.outside, "logits": logits})

    def _update(self, role: Literal["actor", "critic"], logits: int) -> Parts:
        share, section = self.trainers[role], getattr(self.config, role)
        inputs = self._microbatch_tokens(role) * self.model.hidden_size * self.model.layers * self.element
        kept = {"layers' inputs kept": inputs * section.gradient_checkpointing}
        passing = _larger(
            {GATHERED: share.backward, **kept},
            {GATHERED: share.outside, "logits": logits, **kept},
            {"AdamW's temporaries": share.gradients},
        )
        return self._stage(f"update_{role}", active=(role,), learning=role, passing=passing)

    def _microbatch_tokens(self, role: Literal["actor", "critic"]) -> int:
        section = getattr(self.config, role)
        return section.tokens_per_microbatch or section.microbatch_size * self.tokens

    def _engine_problems(self) -> Iterator[str]:
        if self.kv_tokens < self.tokens:
            weights = max(share.weights for share in self.engine)
            least = max(share.weights + self.tokens * share.kv_token for share in self.engine) / self.usable
            remedy = (
                f"at least {least:.3f} is needed" if least < 1 else "no share of it is enough: raise parallel.tp or pp"
            )
            yield (
                f"the engine has room for {self.kv_tokens} tokens, and one prompt with its response may take {self.tokens}:"
                f" of each GPU its weights take {gib(weights)} GiB, and mem_fraction_static = {self.fraction:g} leaves"
                f" {gib(self.static_bytes)} for them and the KV cache; {remedy}."
            )

    def _overfull(self) -> Iterator[str]:
        for name, parts in self.stages.items():
            over = sum(parts.values()) - self.gpu_bytes
            if over <= 0:
                continue
            part, size = max(parts.items(), key=lambda item: item[1])
            remedy = ""
            if parts.get(KV_CACHE, 0) > over:
                largest = (self.static_bytes - over) / self.usable - 0.0005  # rounded down
                remedy = f"; with mem_fraction_static up to {largest:.3f} it would fit"
            yield (
                f"{name} needs {gib(self.gpu_bytes + over)} GiB, {gib(over)} more than there are; the largest part is"
                f" {part}, {gib(size)}{remedy}."
            )

    def as_dict(self) -> dict[str, Any]:
        """Return what --json has; bytes."""
        names = ("gpu_bytes", "fraction", "static_bytes", "kv_tokens", "bucket_bytes", "problems", "fits")
        return {name: getattr(self, name) for name in names} | {
            "notes": NOTES,
            "parameters": self.model.parameters,
            "buffers": self.model.buffers,
            "dtype": self.config.model.dtype,
            "engine": [asdict(share) for share in self.engine],
            "stages": [{"name": n, "total": sum(parts.values()), "parts": parts} for n, parts in self.stages.items()],
        }

    def as_lines(self, source: str) -> list[str]:
        """Return a table with a column for each stage, the verdict and the notes, in at most WIDTH columns.

        source: where the GPU's size comes from, as the end of a sentence.
        """
        totals = {name: sum(parts.values()) for name, parts in self.stages.items()}
        fullest = max(totals, key=lambda name: totals[name])
        left = f"it fits; {fullest} is the fullest stage and leaves {gib(self.gpu_bytes - totals[fullest])} GiB"
        buffers = f" and {self.model.buffers:,} in buffers" if self.model.buffers else ""
        return [
            f"Memory of each GPU in GiB, estimated for {gib(self.gpu_bytes)} GiB ({source})",
            *_sentence(f"model: {self.model.parameters:,} parameters ({self.config.model.dtype}){buffers}"),
            *_sentence(self._engine_sentence()),
            "",
            *self._table(totals),
            "",
            f"VERDICT: {left if self.fits else 'it does NOT fit'}",
            *(line for number, each in enumerate(self.problems, 1) for line in _sentence(f"{number}. {each}", "     ")),
            *(line for note in NOTES for line in _sentence(f"- {note}")),
        ]

    def _engine_sentence(self) -> str:
        parts = [
            (f"stage {share.stage} (layers {share.first_layer}-{share.last_layer}): " if len(self.engine) > 1 else "")
            + f"weights {gib(share.weights)}, KV cache {share.kv_token:,} bytes a token"
            for share in self.engine
        ]
        room = f"mem_fraction_static = {self.fraction:g} is {gib(self.static_bytes)} for both"
        return f"engine, each rank: {'; '.join(parts)}; {room}, room for {self.kv_tokens:,} tokens"

    def _table(self, totals: Parts) -> list[str]:
        names = dict.fromkeys(name for parts in self.stages.values() for name in parts)
        rows = [["", *self.stages]]
        rows += [
            [name, *(gib(parts[name]) if name in parts else "-" for parts in self.stages.values())] for name in names
        ]
        rows.append(["TOTAL", *map(gib, totals.values())])
        fits = ("fits" if total <= self.gpu_bytes else "DOES NOT" for total in totals.values())
        rows.append([f"of {gib(self.gpu_bytes)}", *fits])
        label, widths = max(map(len, names)), [max(len(name), 8) for name in self.stages]
        cells = ["".join(f"  {cell:>{wide}}" for cell, wide in zip(row[1:], widths, strict=True)) for row in rows]
        return [f"  {row[0]:<{label}}{each}" for row, each in zip(rows, cells, strict=True)]


def gib(nbytes: float) -> str:
    """Format bytes as GiB with one digit, two below 1; what would be 0.00 or 0.01 there, in MiB."""
    if 0 < nbytes < 16 * MIB:
        return f"{nbytes / MIB:.1f} MiB"
    return f"{nbytes / GIB:.{1 if nbytes >= GIB else 2 if nbytes else 0}f}"


def _larger(*alternatives: Parts) -> Parts:
    """Return the largest of parts that are never there at once."""
    return max(alternatives, key=lambda parts: sum(parts.values()))


def _sentence(text: str, indent: str = "    ") -> list[str]:
    return wrap(text, WIDTH - 2, initial_indent="  ", subsequent_indent=indent, break_on_hyphens=False)
