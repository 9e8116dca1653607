"""Runs of one half: the engine without a trainer (rollout.only), and the trainer without an engine (rollout.load)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.schema import Config
from harness.learning import Learning
from harness.metrics import Metrics, response_metrics
from harness.rollout.memory_stages import MemoryStages, trim_heap
from harness.rollouts import Rollouts, keep_sample
from harness.runtime.events import EventLog
from harness.trainer.saved_rollouts import SavedRollouts


@dataclass(kw_only=True, slots=True)
class EngineAlone:
    """Generates with the weights that the engine loaded itself, step after step."""

    config: Config
    events: EventLog
    rollouts: Rollouts
    memory: MemoryStages
    saved: SavedRollouts | None
    """Where rollout.save writes."""

    def step(self, index: int) -> Metrics:
        """Return the metrics of the responses to a step's prompts. A collective call of all ranks."""
        with self.events.in_step(index):
            batch = self.rollouts.generate(index)
            self.rollouts.validate(index)
            if self.saved:
                self.saved.save(index, batch)
            keep_sample(self.events, self.rollouts.tokenizer, batch)
            with self.events.phase("free_caches", "all ranks to give back memory that they do not use"):
                self.memory.free_trainer_cache()
        return response_metrics(batch) | {"step": index}

    def validate(self, steps: int) -> None:
        """Validate after the last step, if that is due. A collective call of all ranks."""
        with self.events.in_step(steps):
            self.rollouts.validate(steps)

    def shut_down(self) -> None:
        """End the engine; return on every rank when its processes are gone."""
        with self.events.phase("shutdown", "the engine's processes to end"):
            self.rollouts.engine.shutdown()

    def verdict(self, rollouts: Sequence[Mapping[str, float]]) -> str:
        """Return what the run has shown."""
        return f"{len(rollouts)} steps of the engine without a trainer; engine preset {self.config.engine.preset}"


@dataclass(kw_only=True, slots=True)
class TrainerAlone:
    """Learns from rollouts that another run has saved. There is nothing to sync, and so nothing to verify."""

    events: EventLog
    tokenizer: Any
    learning: Learning
    saved: SavedRollouts
    """What rollout.load names."""

    def step(self, index: int) -> Metrics:
        """Update on the saved responses of a step; return the metrics. A collective call of all ranks."""
        learning = self.learning
        with self.events.in_step(index):
            batch = self.saved.load(index)
            keep_sample(self.events, self.tokenizer, batch)
            waiting = "the actor's log-probs of the responses"
            with learning.actor.on_device(), self.events.phase("old_log_probs", waiting):
                old = learning.actor.old_log_probs(batch)
            metrics = learning.metrics_of(batch, old)
            metrics |= learning.learn(index, batch.replace(old_log_probs=old.log_probs))
            with self.events.phase("free_caches", "all ranks to give back memory that they do not use"):
                trim_heap()
        return metrics | {"step": index}

    def verdict(self, rollouts: Sequence[Mapping[str, float]]) -> str:
        """Return what the run has shown."""
        moved = [each.verdict() for each in self.learning.weight_changes.values() if each.role == "actor" or each.still]
        steps = f"{len(rollouts)} steps of the trainer without an engine, on rollouts of {self.saved.folder}"
        return "; ".join([steps, *moved])
