"""Verification of syncs at the level that weights.verify sets; each level does all that those below it do.

off: only the metrics. log_probs: log-probs against a baseline. tools/verification, which an observer puts in this one's place,
adds fingerprints to log_probs, and has bytes and full.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cluster.world import World, all_gather
from harness.config.layers import ConfigError
from harness.config.schema import Config
from harness.rollout.memory_stages import MemoryStages
from harness.rollout.sglang_api import SGLangApi
from harness.runtime.events import EventLog
from harness.trainer.batch import Batch
from harness.weights.log_probs import LARGEST_BASELINE, Allowed, LogProbDifference
from harness.weights.presync_checks import first_of
from harness.weights.sync import WeightSync
from harness.weights.worker.model_state import fill_model

if TYPE_CHECKING:  # which imports this module
    from harness.ppo import Ppo

LEVELS = ("off", "log_probs", "bytes", "full")


class WeightsDidNotArrive(RuntimeError):
    """The engine computes with other weights than the trainer holds."""


class NoBaseline(RuntimeError):
    """Engine and trainer compute differently on the same weights: a difference after a sync would prove nothing."""


def check_level(config: Config, api: SGLangApi) -> None:
    """Raise ConfigError where this sglang lacks what weights.verify needs."""
    level = config.weights.verify
    if level in ("bytes", "full") and not api.custom_weight_loader:
        raise ConfigError(
            f'weights.verify = "{level}": reading weights back needs custom weight loaders (sglang >= 0.4.8), found'
            f' {api.version}; use "log_probs".'
        )


@dataclass(kw_only=True, slots=True)
class Verification:
    """All checks of a run's syncs on one rank. Every method is a collective call of all ranks."""

    config: Config
    world: World
    events: EventLog
    memory: MemoryStages
    sync: WeightSync
    source: Path
    """The model's own folder."""
    prompts: Sequence[Sequence[int]]
    """Token ids, for rehearsals."""
    baseline: LogProbDifference | None = None
    why_no_baseline: str = ""
    own_checkpoint: dict[str, int] | None = None
    """bytes: fingerprints of what SGLang itself loaded from the model's own checkpoint, until a sync has matched it."""
    sentinel_next: bool = False
    """The engine holds right weights that no sync brought: a tensor that the next sync omits would not show."""
    movement: float = field(init=False)
    """Mean |difference| of log-probs, in nats, between what the engine held before the last sync and what it was sent: what
    a sync that does nothing would leave them off by. Infinite where the engine held garbage."""

    def __post_init__(self) -> None:
        if self.reaches("bytes") and type(self) is Verification:
            raise ConfigError(
                f'weights.verify = "{self.config.weights.verify}" needs the observer of tools/verification.'
            )
        self.movement = math.inf if self.config.engine.initial_weights == "dummy" else 0.0

    def reaches(self, level: str) -> bool:
        """Return whether weights.verify is at least `level`."""
        return LEVELS.index(self.config.weights.verify) >= LEVELS.index(level)

    @property
    def allowed(self) -> Allowed:
        return Allowed.of(self.config.model.dtype, self.baseline)

    def load_baseline(self) -> bool:
        """Bring the engine, resumed or released as it started, onto the model's own checkpoint, by SGLang's disk loader.

        Return False where none is wanted (level off), or none can be taken; the console says why.
        """
        self.why_no_baseline = self._why_no_baseline()
        if self.why_no_baseline:
            if self.reaches("log_probs"):
                allowed = f"allowed is {self.allowed.mean:.2g}"
                self.events.say(f"no baseline of the log-prob difference ({self.why_no_baseline}): {allowed}")
            return False
        if self.config.engine.initial_weights == "dummy":
            self.memory.resume_weights()
            self.memory.resume_kv_cache()
            self.sync.engine.update_weights_from_disk(str(self.source))
            self.sentinel_next = True
        return True

    def _why_no_baseline(self) -> str:
        if not self.reaches("log_probs"):
            return "not wanted at level off"
        if self.config.model.weights == "random":
            return "random weights are in no checkpoint"
        if self.config.engine.initial_weights == "checkpoint":
            return ""
        engine = self.sync.engine
        if not engine.api.custom_weight_loader:
            return f"sglang {engine.api.version} cannot be filled after it, and a lost tensor would not show"
        # Every scheduler reads the path that its engine's head gives; a hub id is no path on any host.
        path = Path(engine.on_head(lambda _: str(self.source)))
        seen = all_gather((self.world.host, path.exists()))
        blind = sorted({host for host, found in seen if not found})
        return f"the model's folder is not on {', '.join(blind)}" if blind and any(found for _, found in seen) else ""

    def set_baseline(self, difference: LogProbDifference) -> None:
        """Keep the difference on the model's own checkpoint. Raise NoBaseline if it is too large."""
        self.baseline = difference
        self.events.fact("log_prob_baseline", **difference.metrics(), allowed=self.allowed.mean)
        self.events.say(
            f"baseline on the model's own checkpoint: log-prob difference {difference.mean:.1e} in the mean,"
            f" so that {self.allowed.mean:.2g} is allowed"
        )
        if not difference.mean <= LARGEST_BASELINE:
            raise NoBaseline(
                f"before the first update, on the checkpoint that SGLang itself loaded from {self.source}, the"
                f" engine's log-probs are off by {difference.mean:.2e} in the mean (at most {LARGEST_BASELINE:g} makes"
                " sense): SGLang and transformers do not compute the same model."
            )

    def rehearse(self, index: int) -> None:
        """Fill the engine's weights with garbage where a baseline, or the level full, asks for it."""
        if self.sentinel_next or self.reaches("full"):
            with self.timed("sentinel", index, "the engine to fill its weights with garbage"):
                with self.sync.engine.weight_update():
                    self.sync.engine.ask(fill_model, f"{self.config.run.seed}/{index}")
                self.sync.engine.flush_cache()
            self.sentinel_next = False

    def check_arrival(self, index: int) -> None:
        """Raise WeightsDidNotArrive where the engine holds other weights; tools/verification looks, this class does not."""

    def check_log_probs(self, index: int, difference: LogProbDifference) -> None:
        """log_probs: raise WeightsDidNotArrive, naming suspects, when the engine's log-probs are not the trainer's."""
        self.events.fact("log_prob_difference", step=index, **difference.metrics())
        violations = self.allowed.violations(difference)
        if not violations or not self.reaches("log_probs"):
            return
        raise WeightsDidNotArrive(
            f"step {index}: the engine's log-probs are off by {', '.join(violations)}; largest {difference.largest:.2e};"
            f" {self.find_suspects(index)}"
        )

    def find_suspects(self, index: int) -> str:
        """Return which tensors of the engine differ from the trainer's, as the end of a sentence."""
        return "tensors were not read back"

    def measured_update(self, ppo: "Ppo", index: int, rollout: Batch) -> AbstractContextManager[None]:
        """Return a context for the update after a rollout; a level may measure `movement` around it."""
        return nullcontext()

    def verdict(self, rollouts: Sequence[Mapping[str, float]]) -> str:
        """Return what the run's verdict claims of the syncs before these rollouts. rollouts: their metrics."""
        largest = max(each["log_prob_difference_mean"] for each in rollouts)
        return f"{len(rollouts)} weight syncs: largest mean log-prob difference {largest:.1e}"

    def sync_metrics(self) -> dict[str, float]:
        """Return what is known of the last sync, whose checks all passed, for metrics.jsonl."""
        return {"sync_movement": self.movement} if math.isfinite(self.movement) else {}

    def timed(self, part: str, index: int | None = None, waiting_for: str = "") -> AbstractContextManager[None]:
        """Return the phase verify_<part> of the event log."""
        return self.events.phase(f"verify_{part}", index, waiting_for)


def refuse(wrong: Sequence[str], sentence: str) -> None:
    if wrong:
        raise WeightsDidNotArrive(f"{sentence}: {first_of(wrong)}")
