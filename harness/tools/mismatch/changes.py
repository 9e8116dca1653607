"""One setting of the engine or of the trainer changed at a time, on the same weights and tokens."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from harness.cluster.world import all_gather
from harness.runtime import GIB
from harness.runtime.fork_server import ForkServer
from harness.tools.mismatch import routers
from harness.tools.mismatch.answer import IN_DECODING, Source
from harness.tools.mismatch.baseline import Baseline
from harness.tools.mismatch.changed_engine import CannotBeMeasured, ChangedEngine, changed_engine, cloned
from harness.tools.mismatch.engine_scores import engine_scores
from harness.tools.mismatch.operators import Compared
from harness.tools.mismatch.scoring import trainer_scores
from harness.tools.mismatch.sources import (
    ENGINE_PRECISION,
    ENGINE_ROUTER,
    PRECISION,
    TRAINER_PRECISION,
    TRAINER_ROUTER,
    EngineChange,
    TrainerChange,
)
from harness.trainer.model import Attention, build_on_meta, load_causal_lm, named_tensors
from harness.weights.log_probs import FLOOR, log_prob_difference

OUTPUTS = ", outputs of modules"
"""What is added to a change whose engine died while the outputs of its modules were recorded."""


@dataclass(kw_only=True, slots=True)
class Changes:
    """What is left of the differences after each change. Every method is a collective call of all ranks."""

    baseline: Baseline
    servers: Sequence[ForkServer]
    """The run's own, of which a changed engine's processes are forked on a CPU."""
    engines: int = 0
    """How many changed engines were started so far."""

    # The engine

    def in_engine(self, change: EngineChange, compare: bool) -> tuple[list[Source], list[Compared]]:
        """Start an engine with one setting changed on the same weights, and score the same tokens.

        compare: also compare the outputs of its modules with the trainer's. If the engine does not start, or dies, the
        last source says why; what was measured before is returned too.
        """
        base, sources, compared, part = self.baseline, list[Source](), list[Compared](), ""
        try:
            with self._started(change) as changed, self._scoring(change):
                sources.append(self._prefill(change, changed))
                if compare:
                    part = OUTPUTS
                    compared = base.compare_outputs(changed.call)[0]
                if not change.alone and self.decode_is_apart:
                    part = IN_DECODING
                    sources.append(self._decoding(change, changed))
        except CannotBeMeasured as error:
            base.run.events.say(f"{change.name} ({change.how}{part}): {error}")
            failed = Source(name=change.name, how=f"{change.how}{part}", why_not=str(error))
            return [*sources, failed], compared
        return [max(sources, key=lambda each: each.removed)], compared

    @contextmanager
    def _started(self, change: EngineChange) -> Iterator[ChangedEngine]:
        base = self.baseline
        self.engines += 1
        weights = base.sent if change.config.model.precision.is_quantized else base.weights
        log_dir = base.run.folder / "engines" / f"changed-{self.engines}"  # the next engine would empty the same file
        is_used = not change.alone or base.group.rank == base.group.head
        ForkServer.hand_over(cloned(self.servers))
        with changed_engine(base.run, change, weights, log_dir, is_used=is_used) as changed:
            yield changed

    def _scoring(self, change: EngineChange) -> AbstractContextManager[None]:
        waiting_for = f"the engine with {change.name} {change.how} to score the same tokens; kernels may compile"
        return self.baseline.run.events.phase("engine_scores", waiting_for=waiting_for)

    def _prefill(self, change: EngineChange, changed: ChangedEngine) -> Source:
        base = self.baseline
        scored = engine_scores(base.group, changed.call, base.measured.batch).log_probs
        if change.name == ENGINE_PRECISION:
            base.exact[change.name] = scored
        after = base.apart(scored, base.own)
        return Source(name=change.name, how=change.how, before=base.prefill, after=after, breadth=change.breadth)

    @property
    def decode_is_apart(self) -> bool:
        """Whether decoding is further from the trainer than prefill is, by more than rounding."""
        base = self.baseline
        return base.decode.mean > max(FLOOR[base.run.config.model.dtype], 2 * base.prefill.mean)

    def _decoding(self, change: EngineChange, changed: ChangedEngine) -> Source:
        """Have a changed engine answer the same prompts, and compare what it reports with the trainer's log-probs.

        An engine cannot be made to decode given tokens, so these are others.
        """
        base, run = self.baseline, self.baseline.run
        rollouts = base.parts.rollouts
        prompts = rollouts.engine_prompts(0)
        batch = changed.call(lambda engine: replace(rollouts, engine=engine).batch_of(prompts))
        assert batch is not None, "every rank uses an engine that is not alone"
        trained = trainer_scores(
            base.model, run.config, base.meshes.fsdp, run.world.device, batch, temperature=base.decode_temperature
        )
        after = log_prob_difference(batch.require("rollout_log_probs"), trained, batch.response_mask)
        how = f"{change.how}{IN_DECODING}"
        return Source(name=change.name, how=how, before=base.decode, after=after, breadth=change.breadth)

    # The trainer

    def in_trainer(self, change: TrainerChange) -> Source:
        """Score the same tokens by a trainer with one setting changed, on the same weights."""
        if change.part == "router":
            return self._exact_router(change)
        base = self.baseline
        source = partial(Source, name=change.name, how=change.how, breadth=change.breadth)
        if change.part == "head":
            with exact_head(base.model):
                scored = base.trained()
        elif why_not := self._refused(change):
            base.run.events.say(f"{change.name} ({change.how}): {why_not}")
            return source(why_not=why_not)
        else:
            scored = self._by_another_model(change)
        return source(before=base.prefill, after=base.apart(base.measured.prefill["together"], scored))

    def _refused(self, change: TrainerChange) -> str:
        """Return why a model with this change is not built or has no room, the same on all ranks; "" if nothing is
        known.

        Every rank finds that out by itself, before any waits for another one. A later failure, such as too little
        memory for what is computed, ends the run: the other ranks are in collectives, which only their end can
        interrupt.
        """
        base = self.baseline
        config = AutoConfig.from_pretrained(str(base.weights), trust_remote_code=False)
        try:
            _, model = build_on_meta(config, self._dtype(change), self._attention(change))
        except (ValueError, ImportError) as error:
            why_not = f"cannot be changed alone: {error}"
        else:
            shard = sum(each.nbytes for _, each in named_tensors(model)) // base.meshes.fsdp.size()
            why_not = no_room(shard, free_bytes(base.run.world.device))
        return next(filter(None, all_gather(why_not)), "")

    def _by_another_model(self, change: TrainerChange) -> Tensor:
        base, run = self.baseline, self.baseline.run
        with run.events.phase("build_trainer", waiting_for=f"a trainer with {change.name} {change.how}"):
            model = load_causal_lm(
                str(base.weights),
                self._dtype(change),
                run.world.device,
                base.meshes.fsdp,
                attention=self._attention(change),
            )
            scored = base.trained(model)
            if change.name == TRAINER_PRECISION:
                base.exact[change.name] = scored
                temperature = base.decode_temperature
                base.measure_rounding(
                    scored, scored if temperature == 1 else base.trained(model, temperature=temperature)
                )
            return scored

    def _dtype(self, change: TrainerChange) -> torch.dtype:
        name = self.baseline.run.config.model.dtype if change.dtype == "same" else change.dtype
        dtype: torch.dtype = getattr(torch, name)
        return dtype

    def _attention(self, change: TrainerChange) -> Attention:
        return self.baseline.inputs.attention if change.attention == "same" else change.attention

    def _exact_router(self, change: TrainerChange) -> Source:
        base = self.baseline
        with routers.exact_routers(base.model) as exactness:
            scored = base.trained()
        if not any(all_gather(exactness.error > routers.NOTHING)):
            return Source(name=change.name, how=change.how, why_not="it computes in float32 already")
        base.exact[change.name] = scored
        after = base.apart(base.measured.prefill["together"], scored)
        return Source(name=change.name, how=change.how, before=base.prefill, after=after)

    # Both

    def in_both(self) -> list[Source]:
        """Return what is left if engine and trainer both compute in float32, all of them or their routers alone.

        One alone keeps the other's rounding. Nothing is returned for what could not be changed on both sides.
        """
        base, exact = self.baseline, self.baseline.exact
        pairs = {
            PRECISION: (ENGINE_PRECISION, TRAINER_PRECISION),
            "precision of the routers": (ENGINE_ROUTER, TRAINER_ROUTER),
        }
        how = f"{base.run.config.model.dtype} -> float32 in both"
        return [
            Source(name=name, how=how, breadth=2, before=base.prefill, after=base.apart(exact[engine], exact[trainer]))
            for name, (engine, trainer) in pairs.items()
            if engine in exact and trainer in exact
        ]


def free_bytes(device: torch.device) -> float:
    """Return how much more this process can take of a GPU; inf on a CPU, where nothing ends when it is used up."""
    if device.type != "cuda":
        return math.inf
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def no_room(shard: int, free: float) -> str:
    """Return why another trainer, whose shard on a rank has so many bytes, cannot be built; "" if its parameters
    fit.
    """
    if shard <= free:
        return ""
    return f"its parameters need {shard / GIB:.1f} GiB of each GPU beside the run's own trainer, and {free / GIB:.1f} are free"


@contextmanager
def exact_head(model: Any) -> Iterator[None]:
    """Have the head of a language model compute in float32, on the weights and inputs that it has."""

    def exact(module: Any, inputs: Any, output: Tensor) -> Tensor:
        bias = None if module.bias is None else module.bias.float()
        return nn.functional.linear(inputs[0].float(), module.weight.float(), bias)

    handle = model.get_output_embeddings().register_forward_hook(exact)
    try:
        yield
    finally:
        handle.remove()
