"""Memory of one GPU in each stage of a step, and whether it fits.

The order of a step is harness/ppo.py's; what stays on the GPU between stages is what memory.offload_* does not name.
"""

from collections.abc import Iterator
from dataclasses import asdict
from textwrap import wrap
from typing import Any, Literal

from harness.config.schema import Config
from harness.rollout.defaults import engine_defaults
from harness.runtime.units import GIB, MIB
from harness.tools.plan.gpu_shares import (
    FLOAT32_BYTES,
    TrainerShare,
    engine_shares,
    kv_element_bytes,
    largest_bucket,
    slots_bytes,
    trainer_share,
)
from harness.tools.plan.model_shapes import model_fields, model_shape

CONTEXT_BYTES = GIB // 2
"""Of a CUDA context, of which trainer and scheduler have one each: taken when the engine starts. Assumed."""
BESIDE_BYTES = 5.7 * GIB
"""CUDA contexts, NCCL's buffers and what SGLang keeps when released, of trainer and scheduler together, after a step.

Of 14.6 GiB that were in use at the end of a step of configs/gpu/memory_7b.toml (4 H200, sglang 0.5.17, torch 2.11), what is
neither parameters of critic and reference nor the sync's buffers.
"""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
BESIDE, KV_CACHE, GATHERED = "CUDA, NCCL, SGLang", "engine: KV cache", "FSDP2: layers gathered"
NOT_COUNTED = (
    "quantization", "enable_dp_attention", "dp_size", "speculative_algorithm", "cpu_offload_gb", "enable_lora",
    "ep_num_redundant_experts", "moe_dense_tp_size",
)  # fmt: skip
"""Arguments that make SGLang cut or store weights in another way than is counted here."""
NOTES = (
    "left out: layers' activations, fragments of torch's allocator, what SGLang computes with (1 - mem_fraction_static of the"
    " GPU is meant for that), what weights.verify = bytes or full needs, other users of the GPU.",
    f"{BESIDE}: contexts, buffers, what SGLang does not free when released; {BESIDE_BYTES / GIB:.1f} GiB in the one run of 4"
    " H200 in which it was measured, more or less in others.",
    "experts are counted as transformers 5 holds them, a layer's in two tensors, of which FSDP2 gives each rank at least one"
    " row, and a bucket has one row of each rank, however small weights.bucket_size_mib is; SGLang as of 0.5.20.",
)
WIDTH = 120

Role = Literal["actor", "critic", "reference"]
Parts = dict[str, int]
"""What is on the GPU, in bytes."""


class MemoryEstimate:
    """The GPU of the rank that has most, in bytes, for GPUs that no other process uses.

    stages: the times of a step when memory is at its height. problems: why it does not fit. notes: what is not counted.
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
        arguments = {name: config.engine.args[name] for name in NOT_COUNTED if config.engine.args.get(name)}
        self.notes = [f"engine.args.{name} = {value} is not counted here." for name, value in arguments.items()] + [
            *NOTES
        ]

    def _stages(self) -> Iterator[tuple[str, Parts]]:
        if self.config.parallel.colocate:
            yield "sync", self._stage("sync", engine=self._engine(kv_cache=self.config.memory.resume == "all"))
            yield "generate", self._stage("generate", active=(), engine=self._engine(kv_cache=True))
        else:
            received = {"sync: bucket received": self.bucket_bytes}
            yield "engine's GPU", {BESIDE: self.beside} | self._engine(kv_cache=True) | received
            yield "sync", self._stage("sync")
        # Logits, their float32 copy at temperature, and for the entropy the softmax, another copy and their product.
        size = self.config.actor.microbatch_size * self.tokens * self.model.vocab_size
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
        stays_open = weights.transport == "stream" or weights.verify in ("bytes", "full")  # from the first sync on
        if name == "sync" or (stays_open and colocate):
            size = slots_bytes(self.bucket_bytes) if colocate and weights.transport != "disk" else self.bucket_bytes
            parts["sync: its two buffers" if colocate else "sync: bucket gathered"] = size
        if self.casts and name == "sync":
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
        inputs = section.microbatch_size * self.tokens * self.model.hidden_size * self.model.layers * self.element
        kept = {"layers' inputs kept": inputs * section.gradient_checkpointing}
        passing = _larger(
            {GATHERED: share.backward, **kept},
            {GATHERED: share.outside, "logits": logits, **kept},
            {"AdamW's temporaries": share.gradients},
        )
        return self._stage(f"update_{role}", active=(role,), learning=role, passing=passing)

    def _engine_problems(self) -> Iterator[str]:
        weights = max(share.weights for share in self.engine)
        if self.kv_tokens >= self.tokens:
            return
        least = max(share.weights + self.tokens * share.kv_token for share in self.engine) / self.usable
        enough = (
            f"at least {least:.3f} is needed"
            if least < 1
            else "no share of this GPU is enough: raise parallel.tp or pp"
        )
        remedy = f"mem_fraction_static = {self.fraction:g} leaves it {gib(self.static_bytes)}; {enough}"
        if weights >= self.static_bytes:
            yield f"the engine cannot start: its weights take {gib(weights)} GiB of each GPU, and {remedy}."
        else:
            yield (
                f"the engine's KV cache has room for {self.kv_tokens} tokens, and one prompt with its response may take"
                f" {self.tokens}: {remedy}."
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
        names = ("gpu_bytes", "fraction", "static_bytes", "kv_tokens", "bucket_bytes", "problems", "notes", "fits")
        return {name: getattr(self, name) for name in names} | {
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
            *(line for note in self.notes for line in _sentence(f"- {note}")),
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
