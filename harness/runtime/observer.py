"""The one seam between a run and the tools around it: what a run announces, and to whom."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # types alone: the rooms above import this one
    from harness.cluster.mesh import ParallelDims
    from harness.cluster.world import Launch, World
    from harness.config.schema import Config
    from harness.runtime.events import EventLog
    from harness.task.data import Row
    from harness.task.rewards import MakeReward
    from harness.trainer.batch import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """Hold what a run knows once its ranks have met; one on every rank."""

    config: "Config"
    world: "World"
    dims: "ParallelDims"
    events: "EventLog"
    folder: Path
    """The run directory."""
    launched: float
    """UNIX time at which torchrun started."""
    models: "dict[str, Callable[[Path, list[Row]], object]]" = field(default_factory=dict)
    """model.name -> what makes that model, and a tokenizer of the rows' text, in a folder; added as rewards are."""
    rewards: "dict[str, MakeReward]" = field(default_factory=dict)
    """task.reward -> what makes it, where it is none of task/rewards.py; an observer adds it once the ranks have met."""
    classes: dict[str, Any] = field(default_factory=dict)
    """"engine", "verification" -> a class in place of the reference's own; an observer adds it once the ranks have met."""


class Observer:
    """Watch a run on one rank. Each method does nothing here; a tool overrides those that it needs.

    A run calls its observers in the order in which they were given and waits for each, so one may delay or end the rank.
    Calls come in this order: launched, phases begin and end, met (a collective call), parts are built, rows are measured,
    and last one of passed and failed, then finished, unless the process is killed. launched, phase_begins, met, built and passed may raise, which ends the run.
    """

    def launched(self, config: "Config", launch: "Launch") -> None:
        """React to a valid launch, before torch.distributed and CUDA are initialized."""

    def met(self, run: RunContext) -> None:
        """React to the first moment at which all ranks can communicate. A collective call of all ranks."""

    def phase_begins(self, phase: str, step: int | None) -> None:
        """React to the start of a phase, before its work."""

    def phase_ends(self, phase: str, step: int | None) -> None:
        """React to the end of a phase that did not fail."""

    def built(self, name: str, part: Any) -> None:
        """React to a part of the run: "engine", "sync", "actor" or "critic", each once it exists."""

    def responded(self, step: int, batch: "Batch") -> None:
        """React to this rank's responses of a step, once the engine's memory is released."""

    def measured(self, row: Mapping[str, Any]) -> None:
        """React to a row of metrics.jsonl, the same on every rank but for rank 0's seconds: of a step, a validation, the last check."""

    def passed(self) -> None:
        """React to a job that passed, before its verdict is printed. A collective call of all ranks."""

    def failed(self, error: str, traceback: str) -> None:
        """React to the error, in one line, that is about to end this rank; traceback may be "". From any thread."""

    def interrupted(self, signal_name: str) -> None:
        """React to the signal that is about to end this rank."""

    def finished(self, code: int) -> None:
        """React to the exit code with which this rank is about to exit on its own."""


class Observers(Observer):
    """Pass each call on to several observers, in order."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        for name in vars(Observer):
            if not name.startswith("_"):
                setattr(self, name, partial(_call_each, [getattr(each, name) for each in observers]))


def _call_each(calls: Sequence[Callable[..., None]], *arguments: Any) -> None:
    for call in calls:
        call(*arguments)
