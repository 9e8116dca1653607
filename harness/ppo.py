"""One PPO step, read from top to bottom.

resume weights -> sync -> resume KV cache -> generate -> validate -> release -> scores -> old log-probs -> reference log-probs, values ->
advantages -> updates of critic and actor -> metrics. The checks that the weights arrived are in weights/verify.py.
"""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch

from harness.cluster.mesh import ParallelDims
from harness.cluster.world import World, all_gather
from harness.config.schema import Config
from harness.rollout.memory_stages import MemoryStages
from harness.rollout.responses import Response, read_responses
from harness.rollout.verl_engine import VerlEngine
from harness.runtime.events import EventLog
from harness.task.data import Prompt, PromptSampler
from harness.task.rewards import Reward
from harness.trainer import advantages
from harness.trainer.actor import Actor, Reference
from harness.trainer.batch import Batch, from_sequences, scatter_responses
from harness.trainer.critic import Critic
from harness.weights.log_probs import BASELINE_TOKENS, LEAST_TOKENS, LogProbDifference, log_prob_difference, merge
from harness.weights.sync import WeightSync
from harness.weights.verify import Verification

Metrics = dict[str, float]


@dataclass(kw_only=True, slots=True)
class Ppo:
    """All parts of a run on one rank. Every method is a collective call of all ranks."""

    config: Config
    world: World
    dims: ParallelDims
    events: EventLog
    engine: VerlEngine
    memory: MemoryStages
    sync: WeightSync
    verification: Verification
    actor: Actor
    critic: Critic | None
    reference: Reference | None
    kl_control: advantages.KlControl
    prompts: PromptSampler
    reward: Reward
    tokenizer: Any
    validation_prompts: Sequence[Prompt] = ()
    validations: dict[int, Metrics] = field(default_factory=dict)
    """What each validation found, by the number of updates before it."""
    first_token_at: float | None = None
    """time.time() when the first step's first tokens arrived."""

    def step(self, index: int) -> Metrics:
        """Run one PPO step; return its metrics, the same on every rank. Raise WeightsDidNotArrive where a sync did not."""
        rollout, metrics = self.rollout(index)
        metrics |= self.learn(index, rollout)
        with self.events.phase("free_caches", index):
            self.memory.free_trainer_cache()
        return metrics | {"step": index}

    def take_baseline(self) -> None:
        """Measure how far engine and trainer are apart on the model's own checkpoint, then release the engine's memory.

        Raise NoBaseline where they are too far apart for a later difference to prove anything.
        """
        with self.events.phase("load_baseline", waiting_for="the engine to load the model's own checkpoint from disk"):
            loaded = self.verification.load_baseline()
        if not loaded:
            return
        waiting = "rollouts on the model's own checkpoint; kernels compile"
        with self.verification.timed("baseline", waiting_for=waiting):
            batches = [self.generate(0)]
            tokens = max(LEAST_TOKENS, int(self.all_sum(batches[0].response_mask.sum())))
            batches += [self.generate(index) for index in range(1, -(-BASELINE_TOKENS // tokens))]
            self.memory.release_all()
            with self.actor.on_device():
                log_probs = [self.actor.log_probs(batch)[0] for batch in batches]
        self.verification.set_baseline(merge([self.difference(*each) for each in zip(batches, log_probs, strict=True)]))

    def rollout(self, index: int) -> tuple[Batch, Metrics]:
        """Return the step's responses with the actor's log-probs of them, and metrics.

        They are generated with the actor's weights, checked at the configured level to have arrived.
        """
        batch = self.respond(index)
        self.show_sample(index, batch)
        with self.actor.on_device():
            with self.events.phase("old_log_probs", index, "the actor's log-probs of the responses"):
                old, entropy = self.actor.log_probs(batch)
            difference = self.difference(batch, old, index)
            self.verification.check_log_probs(index, difference)
        return batch.replace(old_log_probs=old), {
            **self.response_metrics(batch),
            "rollout_entropy": self.token_mean(entropy, batch),
            **difference.metrics(),
            "importance_clipped_share": self.importance_clipped_share(batch, old),
            **self.verification.sync_metrics(),
        }

    def respond(self, index: int) -> Batch:
        """Sync the weights, generate with them, and validate where that is due; leave the engine's memory released."""
        self.bring_weights(index)
        batch = self.answer(index)
        with self.events.phase("release", index, "the engine to free its memory"):
            self.memory.release_all()
        self.events.observer.responded(index, batch)
        return batch

    def answer(self, index: int) -> Batch:
        """Return the engine's responses to the step's prompts; validate where that is due."""
        phase = self.events.phase
        with phase("generate", index, "the engine's responses; the first of a run may compile kernels"):
            # Engines of one run must not sample alike, and a resumed run must sample as this one.
            engine = self.dims.coordinates(self.world.rank).dp
            self.engine.seed(self.config.run.seed * 1_000_003 + index * 1009 + engine)
            batch = self.generate(index)
        self.first_token_at = self.first_token_at or time.time()
        if self.config.validation.is_due(index, self.config.run.steps):
            with phase("validate", index, "the engine's responses to the validation set"):
                self.validations[index] = self.validate(index)
        return batch

    def bring_weights(self, index: int) -> None:
        """Sync the actor's weights to the engine, check that they arrived, and give it its KV cache."""
        phase = self.events.phase
        with phase("resume_weights", index, "the engine to take its weights' memory back"):
            self.memory.resume_weights()
        with self.actor.on_device():
            self.verification.rehearse(index)
            with phase("sync", index, "all ranks to gather the weights and the engine to load them"):
                self.sync.push()
            self.verification.check_arrival(index)
        with phase("resume_kv_cache", index, "the engine to take its KV cache's memory back"):
            self.memory.resume_kv_cache()

    def learn(self, index: int, rollout: Batch) -> Metrics:
        """Estimate advantages, then update critic and actor; in the first algorithm.critic_warmup steps the critic alone."""
        phase, batch = self.events.phase, rollout
        metrics: Metrics = {}
        if self.reference:
            waiting = "the reference's log-probs of the responses"
            with phase("reference_log_probs", index, waiting), self.reference.on_device():
                batch = batch.replace(reference_log_probs=self.reference.log_probs(batch)[0])
        if self.critic:
            with phase("values", index, "the critic's values of the responses"), self.critic.on_device():
                batch = batch.replace(old_values=self.critic.values(batch))
        with phase("advantages", index):
            batch, reward_metrics = self.estimate_advantages(batch)
            batch = self.masked(batch)
        seed = self.config.run.seed * 1_000_003 + index
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed * 1009 + self.world.rank)  # dropout
        if self.critic:
            with phase("update_critic", index, "the critic's optimizer steps"), self.critic.learning():
                metrics |= {f"critic/{name}": value for name, value in self.critic.update(batch, generator).items()}
        if index < self.config.algorithm.critic_warmup:
            self.verification.movement = 0.0  # the next sync sends the same weights
            return reward_metrics | metrics
        waiting = "the actor's optimizer steps"
        measured = self.verification.measured_update(self, index, rollout)
        with phase("update_actor", index, waiting), self.actor.learning(), measured:
            metrics |= {f"actor/{name}": value for name, value in self.actor.update(batch, generator).items()}
        return reward_metrics | metrics

    def generate(self, index: int) -> Batch:
        """Return responses to this rank's share of its engine's prompts, and their scores."""
        config = self.config.rollout
        repeated = [prompt for prompt in self.engine_prompts(index) for _ in range(config.responses_per_prompt)]
        sampling = {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k}
        own, responses, scores = self.sample(repeated, sampling)
        pad_id = self.tokenizer.pad_token_id or 0
        batch = from_sequences([prompt.input_ids for prompt in own], [each.token_ids for each in responses], pad_id)
        return batch.replace(
            group=torch.tensor([prompt.index for prompt in own]),
            scores=torch.tensor(scores, dtype=torch.float32),
            truncated=torch.tensor([each.truncated for each in responses]),
            aborted=torch.tensor([each.aborted for each in responses]),
            rollout_log_probs=scatter_responses([each.log_probs for each in responses], batch),
        )

    def sample(
        self, prompts: Sequence[Prompt], sampling: Mapping[str, float]
    ) -> tuple[Sequence[Prompt], list[Response], list[float]]:
        """Return this rank's share of its engine's prompts, a response to each, and the scores. Ranks of an engine agree."""
        if not prompts:
            return [], [], []
        config = self.config.rollout
        ends = {"max_new_tokens": config.max_response_tokens, "ignore_eos": config.ignore_eos}
        stops = {"stop": list(config.stop), "stop_token_ids": list(config.stop_token_ids)}
        answers = self.engine.generate(
            input_ids=[prompt.input_ids for prompt in prompts],
            sampling_params={**sampling, **ends, **{name: some for name, some in stops.items() if some}},
            return_logprob=True,
        )
        size, place = -(-len(prompts) // self.dims.engine_size), self.dims.engine_rank(self.world.rank)
        share = slice(place * size, (place + 1) * size)
        own, responses = prompts[share], read_responses(answers[share], config.aborted)
        texts = self.tokenizer.batch_decode([each.token_ids for each in responses], skip_special_tokens=True)
        return own, responses, [self.reward(text, prompt.row) for text, prompt in zip(texts, own, strict=True)]

    def validate(self, index: int) -> Metrics:
        """Return the mean reward over the validation set, overall and by data source, of the weights after `index` updates.

        Greedy responses draw no random number, and the next sync flushes their prefixes: training samples as without.
        """
        mine = self.validation_prompts[self.dims.coordinates(self.world.rank).dp :: self.dims.dp]
        own, responses, scores = self.sample(mine, {"temperature": self.config.validation.temperature})
        rows = [
            (prompt.row.data_source, score, len(response.token_ids), response.truncated)
            for prompt, response, score in zip(own, responses, scores, strict=True)
        ]
        sources, rewards, lengths, truncated = zip(*itertools.chain(*all_gather(rows)), strict=True)
        found = {"accuracy": fmean(rewards)}
        for source in sorted(set(sources) - {""}):
            found[f"accuracy/{source}"] = fmean(itertools.compress(rewards, [each == source for each in sources]))
        shown = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
        self.events.say(f"validation after {index} updates, {len(rewards)} rows: {shown}")
        lengths_and_ends = {"response_tokens_mean": fmean(lengths), "truncated_share": fmean(truncated)}
        return found | lengths_and_ends | {"rows": len(rewards)}

    def response_metrics(self, batch: Batch) -> Metrics:
        """Return the mean score of all ranks' responses, their lengths, and the shares of those that did not end."""
        return {
            "reward_mean": self.mean(batch.require("scores")),
            **self.lengths(batch),
            "truncated_share": self.mean(batch.require("truncated").float()),
            "aborted_share": self.mean(batch.require("aborted").float()),
        }

    def masked(self, batch: Batch) -> Batch:
        """Return the batch for the updates: truncated responses without tokens, where rollout.truncated says so."""
        if self.config.rollout.truncated == "train":
            return batch
        return batch.replace(response_mask=batch.response_mask * ~batch.require("truncated")[:, None])

    def engine_prompts(self, index: int) -> list[Prompt]:
        """Return the prompts of this rank's engine: its share of the step's, by dp index."""
        prompts = self.prompts.batch(index)
        share = len(prompts) // self.dims.dp
        start = self.dims.coordinates(self.world.rank).dp * share
        return prompts[start : start + share]

    def estimate_advantages(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Return the batch with advantages of token rewards less the KL: whitened (GAE) or compared (GRPO, RLOO) over all ranks."""
        algorithm, mask = self.config.algorithm, batch.response_mask
        metrics: Metrics = {}
        coefficient, in_reward = self.kl_control.coefficient, None
        if self.reference:
            old, reference = batch.require("old_log_probs"), batch.require("reference_log_probs")
            kl = advantages.kl(old, reference, algorithm.estimator)
            metrics = {"reference_kl": self.sequence_mean(kl, batch), "kl_coefficient": coefficient}
            if algorithm.kl_placement == "reward":
                in_reward = kl
                sequences = self.config.rollout.prompts_per_step * self.config.rollout.responses_per_prompt
                self.kl_control.update(metrics["reference_kl"], sequences)
        rewards = advantages.token_rewards(batch.require("scores"), mask, in_reward, coefficient)
        if self.critic:
            raw, returns = advantages.gae(rewards, batch.require("old_values"), mask, algorithm.gamma, algorithm.lam)
            whitened = advantages.masked_whiten(raw, mask, all_sum=self.all_sum) * mask
            return batch.replace(advantages=whitened, returns=returns), metrics
        # The responses of one prompt may lie on several ranks: compare sequence scores of all of them.
        apart = (
            -1 - self.world.rank * len(batch) - torch.arange(len(batch))
        )  # what has no token is compared with nothing
        gathered = all_gather((rewards.sum(-1), torch.where(mask.any(-1), batch.require("group"), apart)))
        scores, groups = (torch.cat(parts) for parts in zip(*gathered, strict=True))
        column, everywhere = scores[:, None], torch.ones_like(scores)[:, None]
        if algorithm.advantage == "rloo":
            compared = advantages.rloo(column, everywhere, groups)
        else:
            compared = advantages.grpo(column, everywhere, groups, algorithm.normalize_by_std)
        mine = compared.split([len(each[0]) for each in gathered])[self.world.rank]
        return batch.replace(advantages=mine * mask), metrics

    def importance_clipped_share(self, batch: Batch, old: torch.Tensor) -> float:
        """Return the share of tokens whose p_trainer / p_engine is above algorithm.importance_cap; 0 where that is off."""
        cap, log_ratio = self.config.algorithm.importance_cap, old - batch.require("rollout_log_probs")
        return self.token_mean((log_ratio > math.log(cap)).double(), batch) if cap else 0.0

    def difference(self, batch: Batch, log_probs: torch.Tensor, index: int | None = None) -> LogProbDifference:
        """Return the engine's log-probs of the batch against the actor's, [B, T]."""
        with self.verification.timed("log_probs", index):
            return log_prob_difference(batch.require("rollout_log_probs"), log_probs, batch.response_mask)

    def final_check(self, index: int) -> Metrics:
        """Sync the last update too, and check it by one more rollout, without an update."""
        kept = ("log_prob", "reward", "response", "sync_", "truncated")
        return {name: value for name, value in self.rollout(index)[1].items() if name.startswith(kept)}

    def lengths(self, batch: Batch) -> Metrics:
        """Return how long the responses of all ranks are, and all tokens of responses and of prompts and responses."""
        sizes = torch.stack([batch.response_mask.sum(-1), batch.attention_mask.sum(-1)])
        responses, sequences = torch.cat(all_gather(sizes), dim=1).double()
        return {
            "response_tokens_mean": float(responses.mean()),
            "response_tokens_min": float(responses.min()),
            "response_tokens_max": float(responses.max()),
            "response_tokens": float(responses.sum()),
            "tokens": float(sequences.sum()),
        }

    def show_sample(self, index: int, batch: Batch) -> None:
        """Write this rank's first prompt and response of a step to its events."""
        ids, is_response = batch.input_ids[0], batch.response_mask[0].bool()
        prompt = ids[batch.attention_mask[0].bool() & ~is_response]
        text, response = self.tokenizer.batch_decode([prompt, ids[is_response]], skip_special_tokens=True)
        reward = float(batch.require("scores")[0])
        self.events.fact("sample", step=index, prompt=text, response=response, reward=reward)

    def all_sum(self, total: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""
        return torch.stack(all_gather(total)).sum(0)

    def mean(self, values: torch.Tensor) -> float:
        """Return the mean of every rank's values, [B] each."""
        return float(torch.cat(all_gather(values)).double().mean())

    def sequence_mean(self, values: torch.Tensor, batch: Batch) -> float:
        """Return the mean over the sequences of all ranks of each one's mean over its response tokens, as verl's KL."""
        mask = batch.response_mask.bool()
        means = torch.where(mask, values.double(), 0.0).sum(-1) / mask.sum(-1)
        return self.mean(means[mask.any(-1)])

    def token_mean(self, values: torch.Tensor, batch: Batch) -> float:
        """Return the mean over the response tokens of all ranks."""
        return float(advantages.masked_mean(values.double(), batch.response_mask.double(), all_sum=self.all_sum))
