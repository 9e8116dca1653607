"""Observers watch a run: the run announces what happens, and observers write, show, report, or end a run that hangs.

An observer changes nothing about what a run computes. What replaces a part of a run is an argument of harness.run.run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Importing these at run time would import torch, and the watchdog's side of an observer starts without it.
if TYPE_CHECKING:
    from harness.cluster.mesh import ParallelDims
    from harness.cluster.world import Launch, World
    from harness.config.schema import Config
    from harness.runtime.events import EventLog
    from harness.task.rewards import MakeReward


class Observer:
    """Base class of all observers. Every method does nothing here; override the ones you need.

    A run calls its observers in the order in which they were given and waits for each call to return, so an observer
    may delay the rank or end it. The calls come in this order: launched, phase_begins and phase_ends or phase_fails,
    met, resolved, built, measured, and at the end: passed, then finished, for a run that passed; finished alone for a
    user's mistake or a run that SIGTERM has stopped; failed alone for any other failure, which ends the process at
    once. A rank that is killed makes no more calls. An exception in launched, phase_begins, met, resolved, built or
    passed ends the run.
    """

    def launched(self, config: Config, launch: Launch) -> None:
        """React to a valid launch, before torch.distributed and CUDA are initialized."""

    def met(self, run: RunContext) -> None:
        """React to the first moment at which all ranks can communicate. A collective call of all ranks.

        The run's config is still as it was given.
        """

    def resolved(self, run: RunContext) -> None:
        """React to the config as it runs: "auto" is filled in, run.epochs has become run.steps.

        A collective call of all ranks.
        """

    def phase_begins(self, phase: str, step: int | None) -> None:
        """React to the start of a phase, before its work."""

    def phase_ends(self, phase: str, step: int | None) -> None:
        """React to the end of a phase that did not fail."""

    def phase_fails(self, phase: str, step: int | None) -> None:
        """React to an exception that leaves a phase. It may be caught: then the run goes on."""

    def built(self, name: str, part: Any) -> None:
        """React to a new part of the run: "engine", "sync", "actor" or "critic"."""

    def measured(self, row: Mapping[str, Any]) -> None:
        """React to a row of metrics.jsonl: a step, a validation or the final check.

        Only rank 0's row has its own seconds.
        """

    def passed(self) -> None:
        """React to a job that passed, before its verdict is printed. A collective call of all ranks."""

    def failed(self, error: str, traceback: str) -> None:
        """React to the error, one line, that is about to end this rank; traceback may be "". Called from any thread."""

    def interrupted(self, signal_name: str) -> None:
        """React to the signal that is about to end this rank."""

    def finished(self, code: int) -> None:
        """React to the exit code with which this rank is about to exit."""


class Observers(Observer):
    """Pass each call on to several observers, in order."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        for name in vars(Observer):
            if not name.startswith("_"):
                setattr(self, name, partial(_call_each, [getattr(each, name) for each in observers]))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """What a run knows on each rank once its ranks have met; observers see it, and the job gets it as its argument."""

    config: Config
    """As it was given until the job has read its inputs; from then on as it runs (harness/inputs.py: resolved)."""
    world: World
    dims: ParallelDims
    events: EventLog
    folder: Path
    """The run directory."""
    launched: float
    """UNIX time at which torchrun started."""
    observer: Observer = field(default_factory=Observer)
    """All observers of the run."""
    rewards: Mapping[str, MakeReward] = field(default_factory=dict)
    """Rewards in addition to those of task/rewards.py: the value of task.reward -> a function that makes the reward."""
    engine_class: Callable[..., Any] | None = None
    """Called in place of VerlEngine, with the same arguments."""


def _call_each(calls: Sequence[Callable[..., None]], *arguments: Any) -> None:
    for call in calls:
        call(*arguments)
