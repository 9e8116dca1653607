"""One PPO step, in the order in which it happens: read Ppo.step, then the methods below it.

rollout     sync the weights -> generate responses and score them -> validate -> release the engine's memory
            -> the actor's log-probs of the responses, compared with the engine's
learn       reference log-probs -> values -> advantages -> update the critic -> update the actor

harness/rollouts.py is the engine's half of it, harness/learning.py the trainer's; harness/weights checks that the
weights arrived. harness/half_runs.py has the runs of one half alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.config.schema import Config
from harness.learning import Learning, OldLogProbs
from harness.metrics import Metrics
from harness.rollout.memory_stages import MemoryStages
from harness.rollouts import Rollouts, keep_sample
from harness.runtime.events import EventLog
from harness.trainer.batch import Batch
from harness.trainer.over_ranks import all_sum
from harness.trainer.saved_rollouts import SavedRollouts
from harness.weights.log_probs import BASELINE_TOKENS, LEAST_TOKENS
from harness.weights.sync import WeightSync
from harness.weights.verification.second_look import Scored
from harness.weights.verification.verification import Verification


@dataclass(kw_only=True, slots=True)
class Ppo:
    """All parts of a run on one rank. Every method is a collective call of all ranks."""

    config: Config
    events: EventLog
    rollouts: Rollouts
    learning: Learning
    memory: MemoryStages
    sync: WeightSync
    verification: Verification
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
        self.verification.held.check_after_rollout()
        with self.events.phase("release", "the engine to free its memory, which the trainer needs from here on"):
            self.memory.release_all()
        if self.saved:
            self.saved.save(index, batch)
        self.sample = keep_sample(self.events, self.rollouts.tokenizer, batch)
        return self.old_log_probs(batch)

    def sync_weights(self, index: int) -> None:
        """Bring the actor's weights to the engine, check that they arrived, and give the engine its KV cache."""
        phase, verification = self.events.phase, self.verification
        with phase("resume_weights", "the engine to take its weights' memory back"):
            self.memory.resume_weights()
        with self.learning.actor.on_device():
            verification.rehearsal.rehearse(lambda: self.generate_again(index), self.score)
            verification.held.poison()
            with phase("sync", "the engine to receive and load the weights"):
                self.sync.update_engine()
            verification.held.check_after_sync()
            self.sync.engine.set_weight_version(str(index))
            written = verification.reloads.write_last_sync()
        # Only now: while the sync's copies of the weights exist, a GPU may not have room for the KV cache.
        with phase("resume_kv_cache", "the engine to take its KV cache's memory back"):
            self.memory.resume_kv_cache()
        verification.reloads.check_last_sync(written)

    def generate_again(self, index: int) -> Batch:
        """Return responses to a step's prompts for a check, outside of the step's own rollout."""
        return self.rollouts.batch_of(self.rollouts.engine_prompts(index))

    def old_log_probs(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Return the batch with the actor's log-probs of the responses.

        Check them against those that the engine reported.
        """
        actor, verification = self.learning.actor, self.verification
        with actor.on_device():
            with (
                self.events.phase("old_log_probs", "the actor's log-probs of the responses"),
                verification.held.check_forward(actor.model),
            ):
                old = self.checked_log_probs(batch)
            difference, metrics = self.learning.compare(batch, old)
            verification.log_probs.check(difference, Scored(batches=[batch], trained=[old.log_probs], actor=actor))
        return batch.replace(old_log_probs=old.log_probs), metrics | verification.held.metrics()

    def checked_log_probs(self, batch: Batch) -> OldLogProbs:
        """Return what the actor computes for these responses. It must be on the device.

        Raise WrongRoutingRecord if the engine's log-probs contradict the experts that it says it took.
        """
        old = self.learning.old_log_probs(batch)
        if old.differing is not None:
            self.verification.log_probs.check_routing(batch, old.own, old.log_probs, old.differing)
        return old

    def score(self, *batches: Batch) -> Scored:
        """Return these batches with the actor's log-probs of them. It must be on the device."""
        trained = [self.checked_log_probs(each).log_probs for each in batches]
        return Scored(batches=batches, trained=trained, actor=self.learning.actor)

    def take_baseline(self) -> None:
        """Before the first step: measure how far engine and trainer are apart on the same weights, the model's own
        checkpoint.

        Raise NoBaseline if they are further apart than rounding explains.
        """
        phase = self.events.phase
        with phase("load_baseline", "the engine to load the model's own checkpoint from disk"):
            if not self.verification.load_baseline():
                return
        with phase("verify_baseline", "responses on the model's own checkpoint; kernels compile"):
            batches, tokens = list[Batch](), 0
            while tokens < BASELINE_TOKENS:
                batches.append(self.generate_again(len(batches)))
                # An engine that answers with next to nothing must not keep this going for ever.
                tokens += max(LEAST_TOKENS, int(all_sum(batches[-1].response_mask.sum())))
            self.verification.held.find_copies()
            self.memory.release_all()
            with self.learning.actor.on_device():
                scored = self.score(*batches)
        with phase("verify_log_probs", "the trainer's log-probs, to compare them"):
            self.verification.log_probs.set_baseline(scored)

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
        movements = self.learning.movements
        changed = sum(count > 0 for count in movements["actor"].moved.values())
        return "; ".join(
            [
                f"{len(rollouts) - 1} PPO steps",
                self.verification.verdict(rollouts),
                *(each.verdict() for each in movements.values() if each.role == "actor" or each.still),
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
