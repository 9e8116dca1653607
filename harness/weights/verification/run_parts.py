"""RunParts: what every check needs to know of its run."""

from dataclasses import dataclass
from pathlib import Path

from harness.cluster.world import World
from harness.config.precision import Precision
from harness.config.schema import Config
from harness.rollout.memory_stages import MemoryStages
from harness.runtime.events import EventLog
from harness.trainer.actor import Actor
from harness.weights.sync import WeightSync


@dataclass(kw_only=True, slots=True)
class RunParts:
    """The parts of the run whose syncs are checked, on one rank."""

    config: Config
    world: World
    events: EventLog
    memory: MemoryStages
    """The engine's."""
    sync: WeightSync
    actor: Actor
    source: Path
    """The folder that the engine loads: the model's own, or its quantized copy."""
    before_steps: str = "before the first step"
    """What is done before the first step, for a sentence."""

    @property
    def verifies(self) -> bool:
        """Whether anything is checked (weights.verify)."""
        return self.config.weights.verify

    @property
    def compares_held(self) -> bool:
        """Whether what the engine holds is compared: not if the engine cannot be asked."""
        return self.verifies and self.sync.engine.can_ask

    @property
    def precision(self) -> Precision:
        """In what the weights are sent, and computed with."""
        return self.config.model.precision

    @property
    def when(self) -> str:
        """The step that the run is in, for a sentence."""
        return self.before_steps if self.events.step is None else f"step {self.events.step}"

    def load_own_checkpoint(self) -> None:
        """Have SGLang load the model's own checkpoint from disk. The engine must have its weights' memory."""
        self.sync.restore_scales()
        self.sync.engine.update_weights_from_disk(str(self.source))
