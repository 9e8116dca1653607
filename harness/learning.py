"""The trainer's half of a PPO step: log-probs of the responses, advantages, and the updates of critic and actor."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from harness.cluster.world import World
from harness.config.schema import Config
from harness.metrics import Metrics, replay_metrics, response_metrics, routing_metrics
from harness.runtime.events import EventLog
from harness.seeds import seed_of
from harness.trainer.actor import Actor, OldLogProbs, Reference
from harness.trainer.batch import Batch
from harness.trainer.critic import Critic
from harness.trainer.estimate import estimate_advantages
from harness.trainer.learner import Learner
from harness.trainer.rank_sums import token_mean
from harness.weight_changes import WeightChanges
from harness.weights.log_probs import log_prob_difference


@dataclass(kw_only=True, slots=True)
class Learning:
    """The models of a rank. Methods are collective calls of all ranks."""

    config: Config
    world: World
    events: EventLog
    actor: Actor
    critic: Critic | None
    """None unless advantages are estimated by GAE."""
    reference: Reference | None
    """None if the KL to it counts nowhere."""
    weight_changes: Mapping[str, WeightChanges]
    """actor and critic -> what their updates moved."""

    def metrics_of(self, batch: Batch, old: OldLogProbs) -> Metrics:
        """Return the metrics of the responses."""
        engines = batch.require("rollout_log_probs")
        difference = log_prob_difference(engines, old.log_probs, batch.response_mask)
        routing: Metrics = {}
        if self.actor.routers is not None and old.differing is not None:
            routing = routing_metrics(batch, old.differing, len(self.actor.routers.experts))
            if self.config.rollout.routing == "replay":
                routing |= replay_metrics(batch, old.own, old.log_probs)
        entropy = token_mean(old.entropy, batch)
        return {**response_metrics(batch), "rollout_entropy": entropy, **difference.metrics(), **routing}

    def learn(self, index: int, batch: Batch) -> Metrics:
        """Estimate advantages, then update the critic and the actor. Return the metrics of the updates."""
        phase = self.events.phase
        if self.reference:
            with (
                phase("reference_log_probs", "the reference's log-probs of the responses"),
                self.reference.on_device(),
            ):
                batch = batch.replace(reference_log_probs=self.reference.log_probs(batch)[0])
        if self.critic:
            with phase("values", "the critic's values of the responses"), self.critic.on_device():
                batch = batch.replace(old_values=self.critic.values(batch))
        with phase("advantages"):
            batch, metrics = estimate_advantages(batch, self.config)
        seed = self.config.run.seed
        generator = torch.Generator().manual_seed(seed_of(seed, index))  # draws the minibatches, the same on every rank
        torch.manual_seed(seed_of(seed, index, self.world.rank))  # dropout
        if self.critic:
            metrics |= self.update(self.critic, index, batch, generator)
        if index < self.config.algorithm.critic_warmup:
            self.weight_changes["actor"].skip(index)
        else:
            metrics |= self.update(self.actor, index, batch, generator)
        return metrics

    def update(self, learner: Learner, index: int, batch: Batch, generator: torch.Generator) -> Metrics:
        """Take the step's optimizer steps on the actor or the critic; return their metrics, and how many tensors they
        moved.
        """
        role, changes = learner.role, self.weight_changes[learner.role]
        with self.events.phase(f"update_{role}", f"the {role}'s optimizer steps"), learner.learning():
            changes.begin()
            found = learner.update(batch, generator)
            found |= changes.finish(index, found)
        return {f"{role}/{name}": value for name, value in found.items()}
