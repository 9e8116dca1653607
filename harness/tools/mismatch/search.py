"""One setting changed at a time on the same weights and tokens, and the outputs of modules side by side."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig

from harness.build import make_engine
from harness.cluster.mesh import Meshes, ParallelDims, build_meshes
from harness.cluster.world import all_gather
from harness.inputs import Inputs
from harness.observer import RunContext
from harness.ppo import Ppo
from harness.rollout import sglang_api
from harness.rollout.engine import RolloutEngine
from harness.rollout.engine_errors import EngineFailed
from harness.rollout.engine_ranks import Group
from harness.runtime.fork_server import ForkServer
from harness.tools.mismatch import operators, recording, routers
from harness.tools.mismatch.answer import IN_DECODING, Source
from harness.tools.mismatch.operators import Compared
from harness.tools.mismatch.recording import COARSE, Outputs
from harness.tools.mismatch.scoring import SAMPLING, How, engine_scores, trainer_scores
from harness.tools.mismatch.sources import (
    ENGINE_PRECISION,
    ENGINE_ROUTER,
    PRECISION,
    TRAINER_PRECISION,
    TRAINER_ROUTER,
    EngineChange,
    TrainerChange,
)
from harness.trainer.batch import Batch, from_sequences
from harness.trainer.model import load_causal_lm
from harness.weights.log_probs import FLOOR, LogProbDifference, log_prob_difference

DECODE = "decode"
WEIGHTS, SENT = "weights", "weights-sent"
"""Folders of the run directory: the trainer's weights in model.dtype, and as they were sent, if they were quantized."""


def cloned(servers: Sequence[ForkServer]) -> list[ForkServer]:
    """Return servers for one engine, so that the next one has some too; none where they cannot be forked (CUDA)."""
    return [server.clone() for server in servers if server.imported().forks]


@dataclass(kw_only=True, slots=True)
class Measured:
    """The tokens of this rank, and the engine's log-probs of them: float [B, T], aligned as Batch says."""

    batch: Batch
    decode: Tensor
    """As the engine reported them while it generated, at the sampling temperature."""
    prefill: dict[How, Tensor]
    """As it computes them from the whole sequences, at temperature 1."""


@dataclass(kw_only=True)
class Search:
    """The search of one run. Every method is a collective call of all ranks."""

    run: RunContext
    inputs: Inputs
    parts: Ppo
    meshes: Meshes
    measured: Measured

    def __post_init__(self) -> None:
        """Compute the trainer's log-probs, and how far the engine's are from them."""
        assert self.parts.actor and self.parts.engine
        self.model: nn.Module = self.parts.actor.model
        self.group = self.parts.engine.group
        self.weights = self.run.folder / WEIGHTS
        is_quantized = self.run.config.model.rollout_precision != "same"
        self.sent = self.run.folder / SENT if is_quantized else self.weights
        self.own = self._trained()
        self.at_temperature = self._trained(temperature=self.run.config.rollout.temperature)
        self.base = self._apart(self.measured.prefill["together"], self.own)
        self.reported = self._apart(self.measured.decode, self.at_temperature)
        at_1 = self._apart(self.measured.decode, self.own)
        self.decode_temperature = 1.0 if at_1.mean < self.reported.mean else self.run.config.rollout.temperature
        """At which the engine's log-probs of decoding are nearest to the trainer's."""
        self.decode = min(self.reported, at_1, key=lambda each: each.mean)
        self.has_routers = any(routers.routers_of(self.model))
        self.exact = dict[str, Tensor]()
        """Name of a change -> the log-probs of an engine or a trainer in which something computes in float32."""

    # Log-probs

    def _trained(self, model: nn.Module | None = None, temperature: float = 1.0, alone: bool = False) -> Tensor:
        run = self.run
        return trainer_scores(
            model or self.model,
            run.config,
            self.meshes.fsdp,
            run.world.device,
            self.measured.batch,
            temperature=temperature,
            alone=alone,
        )

    def _apart(self, engine: Tensor, trainer: Tensor) -> LogProbDifference:
        return log_prob_difference(engine, trainer, self.measured.batch.response_mask)

    def without_restart(self) -> list[Source]:
        """Return the sources for which neither engine nor trainer has to be built again."""
        own, decode, prefill = self.own, self.measured.decode, self.measured.prefill
        temperature, sources = self.run.config.rollout.temperature, list[Source]()
        if temperature != 1:
            how = f"trainer at {temperature:g} -> at 1"
            at_1 = self._apart(decode, own)
            sources.append(Source(name="temperature", how=how, before=self.reported, after=at_1))
        return [
            *sources,
            Source(name=DECODE, how="decode -> prefill", before=self.decode, after=self.base, breadth=1),
            Source(
                name="batch of the engine",
                how="together -> one by one",
                before=self.base,
                after=self._apart(prefill["one by one"], own),
            ),
            Source(
                name="prefix cache",
                how="prompts from it -> empty",
                before=self._apart(prefill["cached prefix"], own),
                after=self.base,
            ),
            Source(
                name="batch of the trainer",
                how="as configured -> one by one",
                before=self.base,
                after=self._apart(prefill["together"], self._trained(alone=True)),
            ),
        ]

    # Outputs of modules

    def different_fields(self, engine: RolloutEngine) -> list[str]:
        """Return phrases on the fields of the model's config that differ between engine and trainer."""
        theirs = all_gather(engine.ask(recording.config_fields) if engine.can_ask else {})[0]
        ours = recording.plain_fields(AutoConfig.from_pretrained(str(self.inputs.model_folder)).to_dict())
        return operators.different_fields(theirs, ours)

    def compare_outputs(self, engine: RolloutEngine | None) -> tuple[list[Compared], float | None]:
        """Compare what modules return for the sequence of the first engine whose log-probs differ most.

        engine: None on ranks that do not use it. First whole layers are compared, then the modules of the first that differs.
        Return what was compared, and the share of routing choices that differ.
        """
        dtype = self.run.config.model.dtype
        ids = self._worst_sequence()
        ours, theirs = self._both(engine, ids, COARSE)
        compared = operators.compare(ours, theirs, dtype) if ours else []
        flips = operators.routing_flips(ours[0], theirs) if ours else None
        compared = all_gather(compared)[0]
        if layers := operators.suspects(compared, dtype):
            pattern = rf"layers\.({'|'.join(map(str, layers))})(\..+)?"
            ours, theirs = self._both(engine, ids, pattern)
            known = [each for each in compared if operators.layer_of(each.name) not in layers]
            earlier = [each for each in known if (operators.layer_of(each.name) or 0) < layers[0]]
            before = max((each.error for each in earlier if each.name != "norm"), default=0.0)
            agreeing = min((each.agreeing for each in earlier if each.name != "norm"), default=None)
            fine = operators.compare(ours, theirs, dtype, before, agreeing) if ours else []
            compared = operators.in_order(known, fine, layers)
        return all_gather((compared, flips))[0]

    def _worst_sequence(self) -> list[int]:
        """Return the tokens of the sequence of the first engine whose log-probs are furthest apart; the same on all ranks."""
        batch = self.measured.batch
        gaps = ((self.measured.prefill["together"] - self.own).abs() * batch.response_mask).sum(-1)
        row = int(gaps.argmax())
        mine = float(gaps[row]), batch.input_ids[row][batch.attention_mask[row].bool()].tolist()
        first_engine = all_gather(self.group.head)
        found = [each for each, head in zip(all_gather(mine), first_engine, strict=True) if head == first_engine[0]]
        return max(found)[1]

    def _both(self, engine: RolloutEngine | None, ids: list[int], pattern: str) -> tuple[list[Outputs], Outputs]:
        """Return the outputs of each of the engine's ranks, on its head and empty elsewhere, and those of the trainer."""
        ours: list[Outputs] = []
        if engine and engine.can_ask:
            engine.flush_cache()
            engine.ask(recording.start_recording, pattern)
            engine.generate(input_ids=[ids], sampling_params=SAMPLING)
            arrays = engine.group.gather(engine.ask(recording.recorded, len(ids)))
            ours = [recording.as_tensors(each) for each in arrays]
        dist.barrier()
        batch = from_sequences([ids[:-1]], [ids[-1:]], 0)
        with recording.trainer_recording(self.model, pattern) as theirs:
            trainer_scores(self.model, self.run.config, self.meshes.fsdp, self.run.world.device, batch)
        return ours, theirs

    # With another engine, or another trainer

    def save_weights(self) -> None:
        """Write the weights to a folder of the run; if they were quantized, also as they were sent."""
        assert self.parts.sync
        with self.run.events.phase("save_weights", waiting_for="rank 0 to write the weights as they were sent"):
            self.parts.sync.save_model(self.weights, self.inputs.model_folder)
            if self.sent != self.weights:
                self.parts.sync.save(self.sent, self.inputs.engine_folder)
            dist.barrier()

    def shut_down(self) -> None:
        """End the run's own engine."""
        assert self.parts.sync and self.parts.engine
        with self.run.events.phase("shutdown", waiting_for="the engine's processes to end"):
            self.parts.sync.close()
            self.parts.engine.shutdown()

    def changed_engine(self, change: EngineChange, compare: bool) -> tuple[Source, list[Compared]]:
        """Start an engine with one setting changed on the same weights, and score the same tokens.

        compare: also compare the outputs of its modules with the trainer's.
        """
        source = partial(Source, name=change.name, breadth=change.breadth)
        with self._engine(change) as (engine, why_not):
            if why_not:
                return source(how=change.how, why_not=why_not), []
            scored = engine_scores(self.group, engine, self.measured.batch).log_probs
            if change.name == ENGINE_PRECISION:
                self.exact[change.name] = scored
            compared = self.compare_outputs(engine)[0] if compare else []
            found = source(how=change.how, before=self.base, after=self._apart(scored, self.own))
            if engine and not change.alone and self.decode_is_apart:
                how = f"{change.how}{IN_DECODING}"
                decoded = source(how=how, before=self.decode, after=self._decoded(engine))
                found = max(found, decoded, key=lambda each: each.removed)
            return found, compared

    @property
    def decode_is_apart(self) -> bool:
        """Whether decoding is further from the trainer than prefill is, by more than rounding."""
        return self.decode.mean > max(FLOOR[self.run.config.model.dtype], 2 * self.base.mean)

    def _decoded(self, engine: RolloutEngine) -> LogProbDifference:
        """Have a changed engine answer the same prompts; return how far what it reports is from the trainer's log-probs.

        An engine cannot be made to decode given tokens, so these are others.
        """
        batch = replace(self.parts, engine=engine).generate(0)
        run = self.run
        trained = trainer_scores(
            self.model, run.config, self.meshes.fsdp, run.world.device, batch, temperature=self.decode_temperature
        )
        return log_prob_difference(batch.require("rollout_log_probs"), trained, batch.response_mask)

    @contextmanager
    def _engine(self, change: EngineChange) -> Iterator[tuple[RolloutEngine | None, str]]:
        """Start an engine for this block. Give why it did not start on some rank, the same on all ranks."""
        config = replace(change.config, engine=replace(change.config.engine, initial_weights="checkpoint"))
        dims = ParallelDims.of(config.parallel)
        run = replace(self.run, config=config, dims=dims, servers=cloned(self.run.servers))
        mesh = build_meshes(dims, self.run.world.device.type).engines
        engine, why_not = None, ""
        if not change.alone or self.group.rank == self.group.head:
            try:
                is_plain = config.model.rollout_precision == "same"
                engine = make_engine(run, mesh, self.weights if is_plain else self.sent)
            except (EngineFailed, sglang_api.UnknownEngineArgument, ValueError) as error:
                why_not = f"cannot be changed alone: {error}"
        else:
            Group.of(mesh["tp"])  # the names of later groups count the earlier ones, so every rank must make as many
            for server in run.servers:
                server.close()
        why_not = next(filter(None, all_gather(why_not)), "")
        try:
            yield engine, why_not
        finally:
            if engine:
                engine.shutdown()

    def changed_trainer(self, change: TrainerChange) -> Source:
        """Load the same weights into a trainer with one setting changed, and score the same tokens."""
        prefill = self.measured.prefill["together"]
        if change.part == "router":
            return self._exact_router_of_trainer(change)
        if change.part == "head":
            with exact_head(self.model):
                return Source(
                    name=change.name, how=change.how, before=self.base, after=self._apart(prefill, self._trained())
                )
        own = self.run.config.model.dtype
        dtype = getattr(torch, own if change.dtype == "same" else change.dtype)
        with self.run.events.phase("build_trainer", waiting_for=f"a trainer with {change.name} {change.how}"):
            model = load_causal_lm(
                str(self.weights),
                dtype,
                self.run.world.device,
                self.meshes.fsdp,
                attention=self.inputs.attention if change.attention == "same" else change.attention,
            )
            scored = self._trained(model)
        if change.name == TRAINER_PRECISION:
            self.exact[change.name] = scored
        after = self._apart(prefill, scored)
        return Source(name=change.name, how=change.how, before=self.base, after=after, breadth=change.breadth)

    def _exact_router_of_trainer(self, change: TrainerChange) -> Source:
        with routers.exact_routers(self.model) as exactness:
            scored = self._trained()
        if not any(all_gather(exactness.error > routers.NOTHING)):
            return Source(name=change.name, how=change.how, why_not="it computes in float32 already")
        self.exact[change.name] = scored
        after = self._apart(self.measured.prefill["together"], scored)
        return Source(name=change.name, how=change.how, before=self.base, after=after)

    def exact_router_of_engine(self, engine: RolloutEngine) -> list[Source]:
        """Have the routers of the run's own engine compute in float32, and score the same tokens; none without routers."""
        dtype = self.run.config.model.dtype
        if dtype == "float32" or not self.has_routers or not engine.can_ask:
            return []
        source = partial(Source, name=ENGINE_ROUTER, how=f"{dtype} -> float32")
        engine.ask(routers.start_exact_routers)
        scored = engine_scores(self.group, engine, self.measured.batch).log_probs
        found = all_gather(engine.ask(routers.stop_exact_routers))
        error = max(error for _, error in found)
        if not any(calls for calls, _ in found):
            return [source(why_not="SGLang calls no module of a router in prefill")]
        if error <= routers.NOTHING:
            return [source(why_not="it computes in float32 already")]
        after = self._apart(scored, self.own)
        if error > routers.ROUNDING[dtype]:  # more than a precision: what it computes is another product
            how = f"its own scores, which are {error:.0%} off -> the product of its inputs and weights"
            return [Source(name="the engine's router", how=how, before=self.base, after=after)]
        self.exact[ENGINE_ROUTER] = scored
        return [source(before=self.base, after=after)]

    def both_in_float32(self) -> list[Source]:
        """Return what is left if engine and trainer both compute in float32, all of them or their routers alone.

        One alone keeps the other's rounding. Nothing is returned for what could not be changed on both sides.
        """
        pairs = {
            PRECISION: (ENGINE_PRECISION, TRAINER_PRECISION),
            "precision of the routers": (ENGINE_ROUTER, TRAINER_ROUTER),
        }
        how = f"{self.run.config.model.dtype} -> float32 in both"
        return [
            Source(
                name=name,
                how=how,
                breadth=2,
                before=self.base,
                after=self._apart(self.exact[engine], self.exact[trainer]),
            )
            for name, (engine, trainer) in pairs.items()
            if engine in self.exact and trainer in self.exact
        ]


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
