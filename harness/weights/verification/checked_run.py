"""CheckedRun: what every check needs to know of its run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.cluster.world import World
from harness.config.precision import Precision
from harness.config.schema import Config
from harness.rollout.memory_stages import MemoryStages
from harness.runtime.events import EventLog
from harness.weights.sync import WeightSync

Level = Literal["off", "log_probs", "bytes", "full"]
LEVELS: tuple[Level, ...] = ("off", "log_probs", "bytes", "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRun:
    """The run whose syncs are checked, on one rank."""

    config: Config
    world: World
    events: EventLog
    memory: MemoryStages
    """The engine's."""
    sync: WeightSync
    source: Path
    """The folder that the engine loads: the model's own, or its quantized copy."""

    @property
    def level(self) -> Level:
        """The level of the checks that are made: weights.verify, or less if the engine cannot be asked what it
        holds.
        """
        asked = self.config.weights.verify
        return "log_probs" if asked in ("bytes", "full") and not self.sync.engine.can_ask else asked

    def reaches(self, level: Level) -> bool:
        """Return whether the checks of `level` are made."""
        return LEVELS.index(self.level) >= LEVELS.index(level)

    @property
    def compares_held(self) -> bool:
        """Whether what the engine holds is compared: not at level off, nor if the engine cannot be asked."""
        return self.reaches("log_probs") and self.sync.engine.can_ask

    @property
    def precision(self) -> Precision:
        """In what the weights are sent, and computed with."""
        return self.config.model.precision

    @property
    def when(self) -> str:
        """The step that the run is in, for a sentence."""
        return "on the model's own checkpoint" if self.events.step is None else f"step {self.events.step}"

    def load_own_checkpoint(self) -> None:
        """Have SGLang load the model's own checkpoint from disk. The engine must have its weights' memory."""
        self.sync.restore_scales()
        self.sync.engine.update_weights_from_disk(str(self.source))
