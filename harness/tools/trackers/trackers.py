"""Experiment trackers: each row of metrics.jsonl also goes to TensorBoard or wandb, if [trackers] names them.

Rank 0 alone writes. A tracker that cannot start ends the run before its engines start. One that fails later is left out
from then on, with a warning: metrics.jsonl has every row.
"""

import importlib.util
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.layers import ConfigError, to_redacted_toml
from harness.config.schema import Config
from harness.observer import Observer, RunContext


@dataclass(frozen=True, slots=True)
class Tracker:
    """Where the numbers of a run go."""

    place: str
    """Where to look, for the console."""
    write: Callable[[Mapping[str, float], int], None]
    """Write the values of one step."""
    close: Callable[[], None]
    """Send all that is left."""


def open_tensorboard(run: RunContext) -> Tracker:
    """Write event files below the run directory."""
    from torch.utils.tensorboard import SummaryWriter

    folder = run.folder / "tensorboard"
    writer = SummaryWriter(str(folder))
    writer.add_text("config", f"```\n{to_redacted_toml(run.config)}```")

    def write(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Tracker(f"tensorboard --logdir {folder}", write, writer.close)


def open_wandb(run: RunContext) -> Tracker:
    """Start a run of Weights & Biases; its files are below the run directory. Without a login it is offline."""
    import wandb

    mode: Any = os.environ.get("WANDB_MODE")
    if not mode and not wandb.api.api_key:
        mode = "offline"  # wandb would ask for a key on a terminal, and fail elsewhere
    trackers = run.config.trackers
    started = wandb.init(
        project=trackers.project or None,  # None: WANDB_PROJECT counts
        name=trackers.experiment or run.folder.name,
        config=tomllib.loads(to_redacted_toml(run.config)),
        dir=str(run.folder),
        mode=mode,
        settings=wandb.Settings(console="off", silent=True),  # the console is the harness's
    )

    def close() -> None:
        started.finish(exit_code=0)
        wandb.teardown()  # waits for the process that writes: the end of the run would kill it

    return Tracker(
        started.url or f"offline; wandb sync {os.path.dirname(started.dir)}",
        lambda values, step: started.log(dict(values), step=step),
        close,
    )


TRACKERS: dict[str, Callable[[RunContext], Tracker]] = {"tensorboard": open_tensorboard, "wandb": open_wandb}
"""The name of a tracker and of its package -> the function that starts it."""


def check_trackers(config: Config) -> None:
    """Raise ConfigError if a tracker's package is not installed."""
    for name in config.trackers.names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # without an origin it is a folder of that name, such as wandb's own
            raise ConfigError(
                f'trackers.names has "{name}", but {sys.executable} has no package {name}; install it with'
                f" `uv pip install --python {sys.executable} {name}`, or leave it out of trackers.names."
            )


class TrackerWriter(Observer):
    """Give each row to the trackers, on rank 0."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.trackers: dict[str, Tracker] = {}

    def resolved(self, run: RunContext) -> None:
        """Start the trackers, which record the config as it runs.

        A collective call of all ranks; raise ConfigError on each if one does not start.
        """
        from harness.cluster.world import all_gather  # imports torch

        self.say, error = run.events.say, ""
        for name in self.names if run.world.rank == 0 else ():
            try:
                self.trackers[name] = TRACKERS[name](run)
            except Exception as raised:  # of the package's own classes, which change between its releases
                error = (
                    f"tracker {name} cannot start ({_line(raised)}); leave it out of trackers.names, or mend the cause."
                )
                break
            self.say(f"tracker {name}: {self.trackers[name].place}")
        if error := all_gather(error)[0]:
            raise ConfigError(error)

    def measured(self, row: Mapping[str, Any]) -> None:
        """Write the numbers of a row. The final check counts as the step after the last one."""
        step = int(row.get("step", row.get("validation/step", row.get("final/step", 0))))
        values = {name: value for name, value in row.items() if isinstance(value, int | float)}
        self._each(lambda tracker: tracker.write(values, step), f"at step {step}")

    def phase_begins(self, phase: str, step: int | None) -> None:
        """Close before the engine's processes end: the process that writes for wandb would end with them."""
        if phase == "shutdown":
            self._each(lambda tracker: tracker.close(), "at its end")
            self.trackers.clear()

    def _each(self, call: Callable[[Tracker], None], when: str) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                call(tracker)
            except Exception as error:
                del self.trackers[name]
                self.say(
                    f"warning: tracker {name} failed {when} and is left out ({_line(error)}); metrics.jsonl has every row"
                )


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
