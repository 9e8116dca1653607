"""One PPO step, in the order in which it happens: read Ppo.step, then the methods below it.

rollout     sync the weights -> generate responses and score them -> validate -> release the engine's memory
            -> the actor's log-probs of the responses, compared with the engine's
learn       reference log-probs -> values -> advantages -> update the critic -> update the actor

harness/metrics.py computes the metrics, harness/weights checks that the weights arrived.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.cluster.mesh import ParallelDims
from harness.cluster.world import World
from harness.config.schema import Config
from harness.metrics import (
    Metrics,
    importance_clipped_share,
    replay_metrics,
    response_metrics,
    routing_metrics,
    validation_metrics,
)
from harness.movement import Movement
from harness.rollout.engine import RolloutEngine
from harness.rollout.memory_stages import MemoryStages, trim_heap
from harness.rollout.responses import Response, check_weight_version, read_responses
from harness.runtime import clock
from harness.runtime.events import EventLog
from harness.task.data import Prompt, PromptSampler
from harness.task.rewards import Reward
from harness.trainer.actor import Actor, Reference
from harness.trainer.batch import Batch, from_sequences, scatter_responses
from harness.trainer.critic import Critic
from harness.trainer.estimate import estimate_advantages
from harness.trainer.learner import Learner
from harness.trainer.over_ranks import all_sum, token_mean
from harness.trainer.routing import scatter_routing
from harness.trainer.saved_rollouts import SavedRollouts
from harness.weights.log_probs import BASELINE_TOKENS, LEAST_TOKENS, log_prob_difference
from harness.weights.sync import WeightSync
from harness.weights.verification.second_look import Scored
from harness.weights.verification.verification import Verification


@dataclass(kw_only=True, slots=True)
class Ppo:
    """All parts of a run on one rank. Methods are collective calls of all ranks, but for engine_prompts and show_sample;
    `responses` is one of the engine's ranks.

    With rollout.load there is no engine: engine, memory, sync and verification are None. With rollout.only there is no
    trainer: actor, sync and verification are None.
    """

    config: Config
    world: World
    dims: ParallelDims
    events: EventLog
    prompts: PromptSampler
    validation_prompts: Sequence[Prompt]
    tokenizer: Any
    reward: Reward
    engine: RolloutEngine | None
    memory: MemoryStages | None
    sync: WeightSync | None
    verification: Verification | None
    actor: Actor | None
    critic: Critic | None
    """None unless advantages are estimated by GAE."""
    reference: Reference | None
    """None if the KL to it counts nowhere."""
    saved: SavedRollouts | None
    """Where rollout.save writes, or rollout.load reads."""
    movements: Mapping[str, Movement] = field(default_factory=dict)
    """actor and critic -> what their updates moved."""
    routed_shape: tuple[int, int] | None = None
    """Layers, and experts of a token, if the engine is asked which experts each token took (rollout.routing)."""
    validations: dict[int, Metrics] = field(default_factory=dict)
    """Number of updates -> what the validation after them found."""
    first_token_at: float | None = None
    """UNIX seconds when the first step's responses arrived."""

    def step(self, index: int) -> Metrics:
        """Run one PPO step; return its metrics. Raise WeightsDidNotArrive if the weights did not reach the engine."""
        batch, metrics = self.rollout(index)
        if self.actor:
            metrics |= self.learn(index, batch)
        with self.events.phase("free_caches", index):
            self.memory.free_trainer_cache() if self.memory else trim_heap()
        return metrics | {"step": index}

    def rollout(self, index: int) -> tuple[Batch, Metrics]:
        """Return the responses to a step's prompts, with the actor's log-probs of them, and their metrics.

        They are generated with the actor's weights, or loaded from rollout.load.
        """
        if self.engine:
            if self.sync:
                self.sync_weights(index)
            with self.events.phase("generate", index, "the engine's responses; the first of a run may compile kernels"):
                # Engines of one run must not sample alike, and a resumed run must sample as this one does.
                engine = self.dims.coordinates(self.world.rank).dp
                self.engine.seed(self.config.run.seed * 1_000_003 + index * 1009 + engine)
                batch = self.generate(index, str(index) if self.sync else None)
            self.first_token_at = self.first_token_at or clock.now()
            self.validate(index)
            if self.verification:
                self.verification.find_copies(index)
                self.verification.check_held(index)
            if self.actor:
                self.release(index)
            if self.saved:
                self.saved.save(index, batch)
        else:
            assert self.saved
            batch = self.saved.load(index)
        self.show_sample(index, batch)
        metrics = response_metrics(batch)
        if self.actor:
            batch, more = self.old_log_probs(index, batch)
            metrics |= more
        return batch, metrics

    def sync_weights(self, index: int) -> None:
        """Bring the actor's weights to the engine, check that they arrived, and give the engine its KV cache."""
        assert self.memory and self.actor and self.sync and self.verification
        phase = self.events.phase
        with phase("resume_weights", index, "the engine to take its weights' memory back"):
            self.memory.resume_weights()
        with self.actor.on_device():
            self.verification.rehearse(index, self.generate, self.score)
            self.verification.poison(index)
            with phase("sync", index, "the engine to receive and load the weights"):
                self.sync.update_engine()
            self.verification.check_arrival(index)
            self.sync.engine.set_weight_version(str(index))
            self.verification.save_last(index)
        # Only now: while the sync's copies of the weights exist, a GPU may not have room for the KV cache.
        with phase("resume_kv_cache", index, "the engine to take its KV cache's memory back"):
            self.memory.resume_kv_cache()
        self.verification.check_last(index)

    def generate(self, index: int, weight_version: str | None = None) -> Batch:
        """Return the engine's responses to this rank's share of the step's prompts, scored.

        weight_version: raise StaleWeights if one of them was generated with other weights than these.
        """
        config = self.config.rollout
        prompts = [prompt for prompt in self.engine_prompts(index) for _ in range(config.responses_per_prompt)]
        own, responses, scores = self.responses(prompts, config.sampling, self.routed_shape)
        if weight_version is not None:
            check_weight_version(responses, weight_version)
        pad_id = self.tokenizer.pad_token_id or 0
        batch = from_sequences([prompt.input_ids for prompt in own], [each.token_ids for each in responses], pad_id)
        if self.routed_shape:
            routed = scatter_routing([each.routed_experts for each in responses], self.routed_shape, batch)
            batch = batch.replace(routed_experts=routed)
        return batch.replace(
            group=torch.tensor([prompt.index for prompt in own]),
            scores=torch.tensor(scores, dtype=torch.float32),
            truncated=torch.tensor([each.truncated for each in responses]),
            aborted=torch.tensor([each.aborted for each in responses]),
            weight_version=torch.tensor([each.oldest_weights for each in responses]),
            draft_rounds=torch.tensor([each.draft_rounds for each in responses]),
            rollout_log_probs=scatter_responses([each.log_probs for each in responses], batch),
        )

    def engine_prompts(self, index: int) -> list[Prompt]:
        """Return the prompts of this rank's engine: the step's prompts are shared out evenly among the dp engines."""
        prompts = self.prompts.batch(index)
        share = len(prompts) // self.dims.dp
        start = self.dims.coordinates(self.world.rank).dp * share
        return prompts[start : start + share]

    def responses(
        self,
        prompts: Sequence[Prompt],
        sampling: Mapping[str, float],
        routed_shape: tuple[int, int] | None = None,
    ) -> tuple[Sequence[Prompt], list[Response], list[float]]:
        """Have the engine answer these prompts. Return this rank's share of them, with a response and a score for each.

        prompts: the same on all ranks of an engine. routed_shape: ask which experts each token took.
        """
        assert self.engine
        if not prompts:  # an engine may have no row of a small validation set
            return [], [], []
        config = self.config.rollout
        ends = {"max_new_tokens": config.max_response_tokens, "ignore_eos": config.ignore_eos}
        stops = {"stop": list(config.stop), "stop_token_ids": list(config.stop_token_ids)}
        answers = self.engine.generate(
            input_ids=[prompt.input_ids for prompt in prompts],
            sampling_params={**sampling, **ends, **{name: some for name, some in stops.items() if some}},
            return_logprob=True,
            **({"return_routed_experts": True} if routed_shape else {}),
        )
        # Every rank of the engine got all answers, and keeps its share.
        size, place = -(-len(prompts) // self.dims.engine_size), self.dims.engine_rank(self.world.rank)
        share = slice(place * size, (place + 1) * size)
        prompts, responses = prompts[share], read_responses(answers[share], config.aborted, routed_shape)
        texts = self.tokenizer.batch_decode([each.token_ids for each in responses], skip_special_tokens=True)
        return prompts, responses, [self.reward(text, prompt.row) for text, prompt in zip(texts, prompts, strict=True)]

    def validate(self, index: int) -> None:
        """If a validation is due after `index` updates, measure the mean reward on the validation set.

        It leaves training as it is: each step seeds the engine anew, and the next sync flushes the prefixes.
        """
        if not self.config.validation.is_due(index, self.config.run.steps):
            return
        mine = self.validation_prompts[self.dims.coordinates(self.world.rank).dp :: self.dims.dp]
        with self.events.phase("validate", index, "the engine's responses to the validation set"):
            found = validation_metrics(*self.responses(mine, {"temperature": self.config.validation.temperature}))
        self.validations[index] = found
        shown = ", ".join(f"{name} {value:.3f}" for name, value in found.items() if name.startswith("accuracy"))
        self.events.say(f"validation after {index} updates, {found['rows']} rows: {shown}")

    def release(self, index: int) -> None:
        """Free the engine's memory, which the trainer needs from here on."""
        assert self.memory
        with self.events.phase("release", index, "the engine to free its memory"):
            self.memory.release_all()

    def show_sample(self, index: int, batch: Batch) -> None:
        """Write this rank's first prompt and response of a step to its events."""
        ids, is_response = batch.input_ids[0], batch.response_mask[0].bool()
        prompt = ids[batch.attention_mask[0].bool() & ~is_response]
        text, response = self.tokenizer.batch_decode([prompt, ids[is_response]], skip_special_tokens=True)
        reward = float(batch.require("scores")[0])
        self.events.fact("sample", step=index, prompt=text, response=response, reward=reward)

    def old_log_probs(self, index: int, batch: Batch) -> tuple[Batch, Metrics]:
        """Return the batch with the actor's log-probs of the responses. Check them against those that the engine reported.

        They are "old" for the updates that follow: a ratio of PPO compares a token's new log-prob with its old one.
        """
        assert self.actor
        with self.actor.on_device():
            checked = self.verification.check_computed(index, self.actor.model) if self.verification else nullcontext()
            with self.events.phase("old_log_probs", index, "the actor's log-probs of the responses"), checked:
                old, entropy, routing = self.routed_log_probs(batch)
            with self.events.phase("verify_log_probs", index):
                difference = log_prob_difference(batch.require("rollout_log_probs"), old, batch.response_mask)
            if self.verification:
                scored = Scored(batches=[batch], trained=[old], actor=self.actor)
                self.verification.check_log_probs(index, difference, scored)
        return batch.replace(old_log_probs=old), {
            "rollout_entropy": token_mean(entropy, batch),
            **difference.metrics(),
            **routing,
            "importance_clipped_share": importance_clipped_share(batch, old, self.config.algorithm.importance_cap),
            **(self.verification.sync_metrics() if self.verification else {}),
        }

    def routed_log_probs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        """Return the actor's log-probs and entropies, [B, T], and the metrics routing/, none with rollout.routing = "off".

        Raise WrongRoutingRecord if the engine's log-probs contradict the experts that it says it took.
        """
        assert self.actor
        if self.actor.routers is None:
            return *self.actor.log_probs(batch), {}
        own, entropy, differing = self.actor.own_routing(batch)
        metrics, used = routing_metrics(batch, differing, len(self.actor.routers.experts)), own
        if self.config.rollout.routing == "replay":
            used, entropy = self.actor.log_probs(batch)
            metrics |= replay_metrics(batch, own, used)
        if self.verification:
            self.verification.check_routing(batch, own, used, differing)
        return used, entropy, metrics

    def learn(self, index: int, batch: Batch) -> Metrics:
        """Estimate advantages, then update the critic and the actor. Return the metrics of the updates."""
        assert self.actor
        phase = self.events.phase
        if self.reference:
            waiting = "the reference's log-probs of the responses"
            with phase("reference_log_probs", index, waiting), self.reference.on_device():
                batch = batch.replace(reference_log_probs=self.reference.log_probs(batch)[0])
        if self.critic:
            with phase("values", index, "the critic's values of the responses"), self.critic.on_device():
                batch = batch.replace(old_values=self.critic.values(batch))
        with phase("advantages", index):
            batch, metrics = estimate_advantages(batch, self.config)
        seed = self.config.run.seed * 1_000_003 + index
        generator = torch.Generator().manual_seed(seed)  # draws the minibatches, the same on every rank
        torch.manual_seed(seed * 1009 + self.world.rank)  # dropout
        if self.critic:
            metrics |= self.update(self.critic, index, batch, generator)
        if index < self.config.algorithm.critic_warmup:
            self.movements["actor"].skip(index)
        else:
            metrics |= self.update(self.actor, index, batch, generator)
        return metrics

    def update(self, learner: Learner, index: int, batch: Batch, generator: torch.Generator) -> Metrics:
        """Take the step's optimizer steps on the actor or the critic; return their metrics, and how many tensors they moved."""
        role, movement = learner.role, self.movements[learner.role]
        with self.events.phase(f"update_{role}", index, f"the {role}'s optimizer steps"), learner.learning():
            movement.begin()
            found = learner.update(batch, generator)
            found |= movement.finish(index, found)
        return {f"{role}/{name}": value for name, value in found.items()}

    def score(self, *batches: Batch) -> Scored:
        """Return these batches with the actor's log-probs of them. It must be on the device."""
        assert self.actor
        return Scored(batches=batches, trained=[self.routed_log_probs(each)[0] for each in batches], actor=self.actor)

    def take_baseline(self) -> None:
        """Before the first step: measure how far engine and trainer are apart on the same weights, the model's own checkpoint.

        Raise NoBaseline if they are further apart than rounding explains.
        """
        assert self.memory and self.actor and self.verification
        with self.events.phase("load_baseline", waiting_for="the engine to load the model's own checkpoint from disk"):
            if not self.verification.load_baseline():
                return
        with self.events.phase(
            "verify_baseline", waiting_for="responses on the model's own checkpoint; kernels compile"
        ):
            batches, tokens = list[Batch](), 0
            while tokens < BASELINE_TOKENS:
                batches.append(self.generate(len(batches)))
                # An engine that answers with next to nothing must not keep this going for ever.
                tokens += max(LEAST_TOKENS, int(all_sum(batches[-1].response_mask.sum())))
            self.verification.find_copies()
            self.memory.release_all()
            with self.actor.on_device():
                scored = self.score(*batches)
        with self.events.phase("verify_log_probs"):
            self.verification.set_baseline(scored)

    def final_check(self, index: int) -> Metrics:
        """After the last step: sync its update too, and check it by one more rollout, without an update."""
        kept = ("log_prob", "reward", "response", "routing/", "sync_", "truncated", "weight_version")
        return {name: value for name, value in self.rollout(index)[1].items() if name.startswith(kept)}
