"""One PPO step, in the order in which it happens: read Ppo.step, then the methods below it.

rollout     sync the weights -> generate responses and score them -> validate -> release the engine's memory
            -> the actor's log-probs of the responses, compared with the engine's
learn       reference log-probs -> values -> advantages -> update the critic -> update the actor

harness/rollouts.py is the engine's half of it, harness/learning.py the trainer's; harness/weights/verification/proof.py
shows that the weights arrived. harness/half_runs.py has the runs of one half alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.config.schema import Config
from harness.learning import Learning
from harness.metrics import Metrics
from harness.rollout.memory_stages import MemoryStages
from harness.rollouts import Rollouts, keep_sample
from harness.runtime.events import EventLog
from harness.trainer.batch import Batch
from harness.trainer.saved_rollouts import SavedRollouts
from harness.weights.sync import WeightSync
from harness.weights.verification.proof import Proof


@dataclass(kw_only=True, slots=True)
class Ppo:
    """All parts of a run on one rank. Every method is a collective call of all ranks."""

    config: Config
    events: EventLog
    rollouts: Rollouts
    learning: Learning
    memory: MemoryStages
    sync: WeightSync
    proof: Proof
    saved: SavedRollouts | None
    """Where rollout.save writes."""
    sample: str = ""
    """One prompt of the last rollout and its response, as a line for the console."""

    def step(self, index: int) -> Metrics:
        """Run one PPO step; return its metrics. Raise WeightsDidNotArrive if the weights did not reach the engine."""
        with self.events.in_step(index):
            batch, metrics = self.rollout(index)
            metrics |= self.learning.learn(index, batch)
            with self.events.phase("free_caches", "all ranks to give back memory that they do not use"):
                self.memory.free_trainer_cache()
        return metrics | {"step": index}

    def rollout(self, index: int) -> tuple[Batch, Metrics]:
        """Return the responses to a step's prompts, with the actor's log-probs of them, and their metrics."""
        self.sync_weights(index)
        batch = self.rollouts.generate(index, weight_version=str(index))
        self.rollouts.validate(index)
        self.proof.after_rollout()
        with self.events.phase("release", "the engine to free its memory, which the trainer needs from here on"):
            self.memory.release_all()
        if self.saved:
            self.saved.save(index, batch)
        self.sample = keep_sample(self.events, self.rollouts.tokenizer, batch)
        with self.learning.actor.on_device():
            old = self.proof.log_probs(batch)
        metrics = self.learning.metrics_of(batch, old) | self.proof.metrics()
        return batch.replace(old_log_probs=old.log_probs), metrics

    def sync_weights(self, index: int) -> None:
        """Bring the actor's weights to the engine, and give the engine its KV cache."""
        phase = self.events.phase
        with phase("resume_weights", "the engine to take its weights' memory back"):
            self.memory.resume_weights()
        with (
            self.learning.actor.on_device(),
            self.proof.around_sync(),
            phase("sync", "the engine to receive and load the weights"),
        ):
            self.sync.update_engine()
        self.sync.engine.set_weight_version(str(index))
        # Only now: while the sync's copies of the weights exist, a GPU may not have room for the KV cache.
        with phase("resume_kv_cache", "the engine to take its KV cache's memory back"):
            self.memory.resume_kv_cache()

    def final_check(self, index: int) -> Metrics:
        """After the last step: sync its update too, and check it by one more rollout, without an update."""
        kept = ("log_prob", "reward", "response", "routing/", "sync_", "truncated", "weight_version")
        with self.events.in_step(index):
            _, metrics = self.rollout(index)
        return {name: value for name, value in metrics.items() if name.startswith(kept)}

    def shut_down(self) -> None:
        """End the engine; return on every rank when its processes are gone."""
        with self.events.phase("shutdown", "the engine's processes to end"):
            self.sync.close()
            self.rollouts.engine.shutdown()

    def verdict(self, rollouts: Sequence[Mapping[str, float]]) -> str:
        """Return what the run has shown, given the metrics of all its rollouts, the final check's included."""
        weight_changes = self.learning.weight_changes
        changed = sum(count > 0 for count in weight_changes["actor"].moved.values())
        return "; ".join(
            [
                f"{len(rollouts) - 1} PPO steps",
                self.proof.verdict(rollouts),
                *(each.verdict() for each in weight_changes.values() if each.role == "actor" or each.still),
                f"{changed} of the syncs carried changed weights",
                *unused_draft(rollouts),
                f"engine preset {self.config.engine.preset}",
            ]
        )


def unused_draft(rollouts: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a phrase for the verdict if the engine has a draft model, and no answer has a token that it drafted."""
    lengths = [each["speculation/accept_length"] for each in rollouts if "speculation/accept_length" in each]
    if lengths and max(lengths) == 1:
        return ["NO ANSWER USED THE DRAFT MODEL: no token that it drafted was accepted"]
    return []
