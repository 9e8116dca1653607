"""The run as configured: its tokens, and what its own engine and trainer compute for them.

From here come the differences that every change is compared with, and the sources that need no other engine or trainer.
"""

from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig

from harness.cluster.mesh import Meshes
from harness.cluster.world import all_gather
from harness.inputs import Inputs
from harness.observer import RunContext
from harness.ppo import Ppo
from harness.rollout.engine import RolloutEngine
from harness.tools.mismatch import operators, recording, routers
from harness.tools.mismatch.answer import Rounding, Source
from harness.tools.mismatch.engine_scores import SAMPLING, Call, How, calling, engine_scores
from harness.tools.mismatch.operators import Compared
from harness.tools.mismatch.recording import COARSE, Outputs
from harness.tools.mismatch.scoring import trainer_scores
from harness.tools.mismatch.sources import ENGINE_ROUTER
from harness.trainer.batch import Batch, from_sequences
from harness.weights.log_probs import FLOOR, LogProbDifference, log_prob_difference

DECODE = "decode"
WEIGHTS, SENT = "weights", "weights-sent"
"""Folders of the run directory: the trainer's weights in model.dtype, and as they were sent, if they were quantized."""


@dataclass(kw_only=True, slots=True)
class Measured:
    """The tokens of this rank, and the engine's log-probs of them: float [B, T], aligned as Batch says."""

    batch: Batch
    decode: Tensor
    """As the engine reported them while it generated, at the sampling temperature."""
    prefill: dict[How, Tensor]
    """As it computes them from the whole sequences, at temperature 1."""
    again: Tensor
    """The same as `prefill["together"]`, computed once more."""


@dataclass(kw_only=True)
class Baseline:
    """The run as configured. Every method is a collective call of all ranks."""

    run: RunContext
    inputs: Inputs
    parts: Ppo
    meshes: Meshes
    measured: Measured

    def __post_init__(self) -> None:
        """Compute the trainer's log-probs, and how far the engine's are from them."""
        self.model: nn.Module = self.parts.learning.actor.model
        self.group = self.parts.rollouts.engine.group
        self.weights = self.run.folder / WEIGHTS
        is_quantized = self.run.config.model.precision.is_quantized
        self.sent = self.run.folder / SENT if is_quantized else self.weights
        self.own = self.trained()
        self.at_temperature = self.trained(temperature=self.run.config.rollout.temperature)
        self.prefill = self.apart(self.measured.prefill["together"], self.own)
        self.varies = {
            "engine": self.apart(self.measured.prefill["together"], self.measured.again).mean,
            "trainer": self.apart(self.own, self.trained()).mean,
        }
        """Side -> the mean difference of its log-probs from one pass to the next."""
        self.reported = self.apart(self.measured.decode, self.at_temperature)
        at_1 = self.apart(self.measured.decode, self.own)
        self.decode_temperature = 1.0 if at_1.mean < self.reported.mean else self.run.config.rollout.temperature
        """At which the engine's log-probs of decoding are nearest to the trainer's."""
        self.decode = min(self.reported, at_1, key=lambda each: each.mean)
        self.has_routers = any(routers.routers_of(self.model))
        self.exact = dict[str, Tensor]()
        """Name of a change -> the log-probs of an engine or a trainer in which something computes in float32."""
        self.rounding: Rounding | None = None

    # Log-probs

    def trained(self, model: nn.Module | None = None, temperature: float = 1.0, alone: bool = False) -> Tensor:
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

    def apart(self, engine: Tensor, trainer: Tensor) -> LogProbDifference:
        return log_prob_difference(engine, trainer, self.measured.batch.response_mask)

    def measure_rounding(self, exact: Tensor, exact_in_decoding: Tensor) -> None:
        """Compare with the log-probs of a trainer in float32: at temperature 1, and at that of decoding."""
        engine, is_at_1 = self.measured, self.decode_temperature == 1
        prefill = (self.apart(each, exact) for each in engine.prefill.values())
        theirs = [*prefill, self.apart(engine.decode, exact_in_decoding)]
        ours = [
            self.apart(self.own, exact),
            self.apart(self.own if is_at_1 else self.at_temperature, exact_in_decoding),
        ]
        self.rounding = Rounding(
            engine=max(each.mean for each in theirs),
            trainer=max(each.mean for each in ours),
            engine_bulk=max(each.bulk for each in theirs),
            trainer_bulk=max(each.bulk for each in ours),
        )

    def without_restart(self) -> list[Source]:
        """Return the sources for which neither engine nor trainer has to be built again."""
        own, scored = self.own, self.measured.prefill
        temperature, sources = self.run.config.rollout.temperature, list[Source]()
        if temperature != 1:
            sources.append(self._temperature(temperature))
        return [
            *sources,
            Source(name=DECODE, how="decode -> prefill", before=self.decode, after=self.prefill, breadth=1),
            Source(
                name="batch of the engine",
                how="together -> one by one",
                before=self.prefill,
                after=self.apart(scored["one by one"], own),
            ),
            Source(
                name="prefix cache",
                how="prompts from it -> empty",
                before=self.apart(scored["cached prefix"], own),
                after=self.prefill,
                breadth=1,  # where it shows; a setting that does it says more
            ),
            Source(
                name="batch of the trainer",
                how="as configured -> one by one",
                before=self.prefill,
                after=self.apart(scored["together"], self.trained(alone=True)),
            ),
        ]

    def _temperature(self, temperature: float) -> Source:
        """Return what is left of the difference of decoding if both sides are at temperature 1."""
        if self.apart(self.own, self.at_temperature).mean <= FLOOR["float32"]:
            # What the engine reported is at another temperature than anything that this trainer computes. Prefill is at
            # 1.
            how = f"the trainer's log-probs are the same at {temperature:g} and at 1 -> both at 1, in prefill"
            return Source(name="temperature", how=how, before=self.reported, after=self.prefill)
        how = f"trainer at {temperature:g} -> at 1"
        return Source(
            name="temperature", how=how, before=self.reported, after=self.apart(self.measured.decode, self.own)
        )

    # Outputs of modules

    def different_fields(self, engine: RolloutEngine) -> list[str]:
        """Return a phrase for each field of the model's config that is another one in the engine than in the
        trainer.
        """
        theirs = all_gather(engine.ask(recording.config_fields) if engine.can_ask else {})[0]
        ours = recording.plain_fields(
            AutoConfig.from_pretrained(str(self.inputs.model_folder), trust_remote_code=False).to_dict()
        )
        return operators.different_fields(theirs, ours)

    def compare_outputs(self, call: Call) -> tuple[list[Compared], float | None]:
        """Compare what modules return for the sequence of the first engine whose log-probs differ most.

        call: of the run's own engine or of a changed one. First whole layers are compared, then the modules of the
        first that differs. Return what was compared, and the share of routing choices that differ.
        """
        dtype = self.run.config.model.dtype
        ids = self._worst_sequence()
        ours, theirs = self._both(call, ids, COARSE)
        compared = operators.compare(ours, theirs, dtype) if ours else []
        flips = operators.routing_flips(ours[0], theirs) if ours else None
        compared = all_gather(compared)[0]
        if layers := operators.suspects(compared, dtype):
            pattern = rf"layers\.({'|'.join(map(str, layers))})(\..+)?"
            ours, theirs = self._both(call, ids, pattern)
            known = [each for each in compared if operators.layer_of(each.name) not in layers]
            earlier = [each for each in known if (operators.layer_of(each.name) or 0) < layers[0]]
            before = max((each.error for each in earlier if each.name != "norm"), default=0.0)
            agreeing = min((each.agreeing for each in earlier if each.name != "norm"), default=None)
            fine = operators.compare(ours, theirs, dtype, before, agreeing) if ours else []
            compared = operators.in_order(known, fine, layers)
        return all_gather((compared, flips))[0]

    def _worst_sequence(self) -> list[int]:
        """Return the tokens of the sequence of the first engine whose log-probs are furthest apart; the same on all
        ranks.
        """
        batch = self.measured.batch
        gaps = ((self.measured.prefill["together"] - self.own).abs() * batch.response_mask).sum(-1)
        row = int(gaps.argmax())
        mine = float(gaps[row]), batch.input_ids[row][batch.attention_mask[row].bool()].tolist()
        first_engine = all_gather(self.group.head)
        found = [each for each, head in zip(all_gather(mine), first_engine, strict=True) if head == first_engine[0]]
        return max(found)[1]

    def _both(self, call: Call, ids: list[int], pattern: str) -> tuple[list[Outputs], Outputs]:
        """Return the outputs of each of the engine's ranks, on its head and empty elsewhere, and those of the
        trainer.
        """
        ours = call(partial(engine_outputs, ids=ids, pattern=pattern)) or []
        dist.barrier()
        batch = from_sequences([ids[:-1]], [ids[-1:]], 0)
        with recording.trainer_recording(self.model, pattern) as theirs:
            trainer_scores(self.model, self.run.config, self.meshes.fsdp, self.run.world.device, batch)
        return ours, theirs

    def exact_router_of_engine(self, engine: RolloutEngine) -> list[Source]:
        """Switch the engine's routers to float32 and score the same tokens; return [] if that cannot be done."""
        dtype = self.run.config.model.dtype
        if dtype == "float32" or not self.has_routers or not engine.can_ask:
            return []
        source = partial(Source, name=ENGINE_ROUTER, how=f"{dtype} -> float32")
        engine.ask(routers.start_exact_routers)
        scored = engine_scores(self.group, calling(engine), self.measured.batch).log_probs
        found = all_gather(engine.ask(routers.stop_exact_routers))
        error = max(error for _, error in found)
        if not any(calls for calls, _ in found):
            return [source(why_not="SGLang calls no module of a router in prefill")]
        if error <= routers.NOTHING:
            return [source(why_not="it computes in float32 already")]
        after = self.apart(scored, self.own)
        if error > routers.ROUNDING[dtype]:  # more than a precision: what it computes is another product
            how = f"its own scores, which are {error:.0%} off -> the product of its inputs and weights"
            return [Source(name="the engine's router", how=how, before=self.prefill, after=after)]
        self.exact[ENGINE_ROUTER] = scored
        return [source(before=self.prefill, after=after)]

    def save_weights(self) -> None:
        """Write the trainer's weights to a folder of the run, and, if they were sent quantized, those to another
        one.
        """
        with self.run.events.phase("save_weights", waiting_for="rank 0 to write the weights as they were sent"):
            self.parts.sync.save_model(self.weights, self.inputs.model_folder)
            if self.sent != self.weights:
                self.parts.sync.save(self.sent, self.inputs.engine_folder)
            dist.barrier()

    def shut_down(self) -> None:
        """End the run's own engine."""
        self.parts.shut_down()


def engine_outputs(engine: RolloutEngine, ids: list[int], pattern: str) -> list[Outputs]:
    """Return what the modules of each of an engine's ranks compute for one sequence, on its head; [] elsewhere."""
    if not engine.can_ask:
        return []
    engine.flush_cache()
    engine.ask(recording.start_recording, pattern)
    engine.generate(input_ids=[ids], sampling_params=SAMPLING)
    arrays = engine.group.gather(engine.ask(recording.recorded, len(ids)))
    return [recording.as_tensors(each) for each in arrays]
