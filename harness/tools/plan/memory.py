"""Memory of one GPU in each stage of a step, and whether it fits.

The order of a step is harness/ppo.py's; what stays on the GPU between stages is what memory.offload_* does not name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from harness.config.schema import Config
from harness.rollout.defaults import engine_defaults
from harness.tools.plan.engine import EngineShare, engine_shares, layout_of, not_counted
from harness.tools.plan.shapes import ModelShape, model_fields, model_shape
from harness.tools.plan.trainer import (
    Precision,
    TrainerShare,
    checkpointed_bytes,
    largest_bucket,
    logits_bytes,
    padding_factor,
    slots_bytes,
    trainer_share,
)

GIB, MIB = 1 << 30, 1 << 20
CONTEXT_BYTES = GIB // 2
"""Of a CUDA context, of which trainer and scheduler have one each: taken when the engine starts. Assumed."""
BESIDE_BYTES = 5.7 * GIB
"""Of CUDA contexts, NCCL's buffers and what SGLang keeps released, of trainer and scheduler together, once a step has run: of
14.6 GiB that were in use at the end of a step of configs/gpu/memory_7b.toml (4 H200, sglang 0.5.17, torch 2.11), what is
neither parameters of critic and reference nor the sync's buffers."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
PADDING_WORTH_SAYING = 1.05

BESIDE, KV_CACHE, GATHERED = "CUDA, NCCL, SGLang", "engine: KV cache", "FSDP2: layers gathered"

Role = Literal["actor", "critic", "reference"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A time of a step in which memory is at its height. parts: what is on the GPU, in bytes."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The GPU of the rank that has most, in bytes."""

    gpu_bytes: int
    parameters: int
    """Elements."""
    buffers: int
    """Elements of persistent buffers."""
    dtype: str
    engine: tuple[EngineShare, ...]
    """By pipeline stage."""
    fraction: float
    """mem_fraction_static."""
    static_bytes: int
    """What the fraction leaves for weights and KV cache."""
    kv_tokens: int
    """Tokens that the KV cache has room for; 0 where the weights leave none."""
    bucket_bytes: int
    """Largest bucket of a weight sync."""
    stages: tuple[Stage, ...]
    host_bytes: int
    """Offloaded to host memory, a rank."""
    problems: tuple[str, ...]
    """Why it does not fit; none where it does."""
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.problems


def estimate(config: Config, gpu_bytes: int) -> Estimate:
    """For GPUs that nothing else uses. Raises UnknownShape where the model's config is not known here."""
    return _Sums(
        config, model_shape(model_fields(config.model.name, config.model.overrides, "cuda")), gpu_bytes
    ).estimate()


class _Sums:
    """All shares of one run, and what they add up to."""

    def __init__(self, config: Config, model: ModelShape, gpu_bytes: int) -> None:
        parallel = config.parallel
        self.config, self.model, self.gpu_bytes = config, model, gpu_bytes
        self.arguments = {**engine_defaults("cuda", config.engine.defaults), **config.engine.args}
        self.apart = not parallel.colocate
        self.element = DTYPE_BYTES[config.model.dtype]
        self.ranks = parallel.dp * parallel.tp * parallel.pp
        processes = 1 if self.apart else 2  # on one GPU
        self.contexts = processes * CONTEXT_BYTES
        self.beside = int(BESIDE_BYTES * processes / 2)
        self.layout = layout_of(parallel.tp, parallel.pp, self.element, self.arguments)
        self.shares = engine_shares(model, self.layout)
        self.fraction = float(self.arguments["mem_fraction_static"])
        # SGLang takes the fraction of what is free when the engine starts, which is before the trainer is built.
        self.static = int(self.fraction * (gpu_bytes - self.contexts))
        self.kv_tokens = self._kv_tokens()
        learns = Precision(master=DTYPE_BYTES[config.model.master_dtype], compute=self.element)
        self.casts = learns.master != learns.compute
        self.trainers: dict[Role, TrainerShare] = {"actor": trainer_share(model, self.ranks, learns)}
        if config.algorithm.has_critic:
            self.trainers["critic"] = trainer_share(model, self.ranks, learns, head=False)
        if config.algorithm.kl_placement != "none":
            frozen = Precision(master=self.element, compute=self.element)
            self.trainers["reference"] = trainer_share(model, self.ranks, frozen)
        self.bucket = largest_bucket(model, self.ranks, self.element, config.weights.bucket_size_mib * MIB)

    def estimate(self) -> Estimate:
        stages = tuple(self._stages())
        return Estimate(
            gpu_bytes=self.gpu_bytes,
            parameters=self.model.parameters,
            buffers=self.model.buffers,
            dtype=self.config.model.dtype,
            engine=tuple(self.shares),
            fraction=self.fraction,
            static_bytes=self.static,
            kv_tokens=self.kv_tokens,
            bucket_bytes=self.bucket,
            stages=stages,
            host_bytes=self._host_bytes(),
            problems=tuple([*self._engine_problems(), *self._overfull(stages)]),
            notes=tuple(self._notes()),
        )

    def _kv_tokens(self) -> int:
        """The stage with least room decides for all, as SGLang has it."""
        shares = [share for share in self.shares if share.kv_token]  # a stage without a layer caches nothing
        room = min((self.static - share.weights) // share.kv_token for share in shares)
        return max(0, min(room, int(self.arguments.get("max_total_tokens") or room)))

    def _stages(self) -> list[Stage]:
        resume_all = self.config.memory.resume == "all"
        if self.apart:
            received = {"sync: bucket received": self.bucket}
            resumed = {BESIDE: self.beside} | self._engine(kv_cache=True)
            stages = [Stage(name="engine's GPU", parts=resumed | received), self._stage("sync")]
        else:
            stages = [
                self._stage("sync", engine=self._engine(kv_cache=resume_all)),
                self._stage("generate", active=(), engine=self._engine(kv_cache=True)),
            ]
        tokens = self.config.task.max_prompt_tokens + self.config.rollout.max_response_tokens
        logits = logits_bytes(self.config.actor.microbatch_size, tokens, self.model.vocab_size, self.element)
        stages.append(self._stage("log_probs", passing=self._forward("actor", logits)))
        if "reference" in self.trainers:
            passing = self._forward("reference", logits)
            stages.append(self._stage("reference", active=("reference",), passing=passing))
        if "critic" in self.trainers:
            stages.append(self._update("critic", 0, tokens))
        return [*stages, self._update("actor", logits, tokens)]

    def _stage(
        self,
        name: str,
        active: tuple[Role, ...] = ("actor",),
        learning: Role | None = None,
        engine: Mapping[str, int] | None = None,
        passing: Mapping[str, int] | None = None,
    ) -> Stage:
        """active: whose parameters are on the GPU, offloaded or not. engine: what of it is resumed; where there is no memory
        saver, all of it always is."""
        if engine is None:
            saver = self.arguments.get("enable_memory_saver") or self.apart
            engine = {} if saver else self._engine(kv_cache=True)
        memory, parts = self.config.memory, {BESIDE: self.beside, **engine}
        for role, share in self.trainers.items():
            if role in active or role not in memory.offload_parameters:
                parts[f"{role}: parameters"] = share.parameters
            if role != "reference" and (role == learning or role not in memory.offload_optimizer):
                parts[f"{role}: AdamW states"] = share.optimizer
            if role == learning:
                parts[f"{role}: gradients"] = share.gradients
        if self._keeps_slots or name == "sync":
            parts["sync: its two buffers" if not self.apart else "sync: bucket gathered"] = self._sync_bytes
        if self.casts and name == "sync":
            parts["sync: own rows, cast"] = self.bucket // self.ranks
        return Stage(name=name, parts=parts | dict(passing or {}))

    def _engine(self, kv_cache: bool) -> dict[str, int]:
        """Of the pipeline stage that has most."""
        weights = {"engine: weights": max(share.weights for share in self.shares)}
        if not kv_cache:
            return weights
        most = max(share.weights + self.kv_tokens * share.kv_token for share in self.shares)
        return weights | {KV_CACHE: most - weights["engine: weights"]}

    def _forward(self, role: Role, logits: int) -> dict[str, int]:
        share = self.trainers[role]
        return _larger(
            {GATHERED: share.forward},
            {GATHERED: share.outside, "logits": logits},
        )

    def _update(self, role: Literal["actor", "critic"], logits: int, tokens: int) -> Stage:
        share, section = self.trainers[role], getattr(self.config, role)
        kept = 0
        if section.gradient_checkpointing:
            kept = checkpointed_bytes(self.model, section.microbatch_size, tokens, self.element)
        passing = _larger(
            {GATHERED: share.backward, "layers' inputs kept": kept},
            {GATHERED: share.outside, "logits": logits, "layers' inputs kept": kept},
            {"AdamW's temporaries": share.optimizer_step},
        )
        return self._stage(f"update_{role}", active=(role,), learning=role, passing=passing)

    @property
    def _keeps_slots(self) -> bool:
        """The stream transport's buffers stay open from the first sync on."""
        return self.config.weights.transport == "stream" and not self.apart

    @property
    def _sync_bytes(self) -> int:
        return self.bucket if self.apart or self.config.weights.transport == "disk" else slots_bytes(self.bucket)

    def _host_bytes(self) -> int:
        memory, total = self.config.memory, 0
        for role, share in self.trainers.items():
            total += share.parameters * (role in memory.offload_parameters)
            total += share.optimizer * (role in memory.offload_optimizer)
            total += share.gradients * (role in memory.offload_gradients)
        return total

    def _engine_problems(self) -> list[str]:
        usable, found = self.gpu_bytes - self.contexts, []
        weights = max(share.weights for share in self.shares)
        needed = self.config.task.max_prompt_tokens + self.config.rollout.max_response_tokens
        if self.kv_tokens >= needed:
            return []
        least = max(share.weights + needed * share.kv_token for share in self.shares) / usable
        remedy = (
            f"at least {least:.3f} is needed"
            if least < 1
            else "no share of this GPU is enough: raise parallel.tp or pp"
        )
        if weights >= self.static:
            found.append(
                f"the engine cannot start: its weights take {gib(weights)} GiB of each GPU, and mem_fraction_static ="
                f" {self.fraction:g} leaves it {gib(self.static)}; {remedy}."
            )
        else:
            found.append(
                f"the engine's KV cache has room for {self.kv_tokens} tokens, and one prompt with its response may take"
                f" {needed} (mem_fraction_static = {self.fraction:g}; {remedy})."
            )
        return found

    def _overfull(self, stages: tuple[Stage, ...]) -> list[str]:
        found = []
        for stage in stages:
            over = stage.total - self.gpu_bytes
            if over <= 0:
                continue
            part, size = max(stage.parts.items(), key=lambda item: item[1])
            remedy = ""
            if stage.parts.get(KV_CACHE, 0) > over:
                largest = (self.static - over) / (self.gpu_bytes - self.contexts)
                remedy = f"; with mem_fraction_static up to {math.floor(largest * 1000) / 1000:.3f} it would fit"
            elif part == GATHERED:
                remedy = (
                    f": FSDP2 has the whole of a layer on every GPU, up to {self.model.largest_layer / 1e9:.1f} B elements,"
                    " however many GPUs there are"
                )
            found.append(
                f"{stage.name} needs {gib(stage.total)} GiB, {gib(over)} more than there are; the largest part is"
                f" {part}, {gib(size)}{remedy}."
            )
        return found

    def _notes(self) -> list[str]:
        notes = []
        if (factor := padding_factor(self.model, self.ranks)) > PADDING_WORTH_SAYING:
            notes.append(
                f"FSDP2 gives each of {self.ranks} ranks at least one row of every tensor: together they keep {factor:.2f}"
                " times the model's elements, and a layer is gathered with that padding"
                + (f" ({self.model.experts} experts are {self.model.experts} rows)." if self.model.experts else ".")
            )
        limit = self.config.weights.bucket_size_mib * MIB
        if self.bucket > limit:
            notes.append(
                f"the sync's largest bucket is {self.bucket // MIB} MiB, more than weights.bucket_size_mib ="
                f" {limit // MIB}: one row of each of the {self.ranks} ranks, a tensor of a dense layer, and what fuses on"
                " arrival stay whole."
            )
        notes += not_counted(self.config.engine.args)
        kept = "layers' activations" + ("" if self._checkpoints else " (gradient_checkpointing is off)")
        notes.append(
            f"left out: {kept}, fragments of torch's allocator, what SGLang computes with (1 - mem_fraction_static of the GPU is"
            " meant for that), what weights.verify = bytes or full needs, other users of the GPU."
        )
        notes.append(
            f"{BESIDE}: contexts, buffers, what SGLang does not free released; {gib(BESIDE_BYTES)} GiB in the one run of 4 H200 in"
            " which it was measured, more or less in others."
        )
        notes.append("experts are counted as transformers 5 holds them, a layer's in two tensors; SGLang as of 0.5.20.")
        return notes

    @property
    def _checkpoints(self) -> bool:
        critic = "critic" not in self.trainers or self.config.critic.gradient_checkpointing
        return self.config.actor.gradient_checkpointing and critic


def gib(nbytes: float) -> str:
    """Bytes as GiB with one digit, two below 1."""
    return f"{nbytes / GIB:.1f}" if abs(nbytes) >= GIB else f"{nbytes / GIB:.2f}"


def _larger(*alternatives: dict[str, int]) -> dict[str, int]:
    """Of times that exclude each other, the one that takes most."""
    return max(alternatives, key=lambda parts: sum(parts.values()))
