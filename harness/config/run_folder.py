"""The directory of a run: each run has its own, which no other user can read."""

import itertools
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Literal

from harness.config.layers import ConfigError, shown, to_toml
from harness.config.schema import Config
from harness.runtime import redact

CONFIG, EVENTS = "config.toml", "events"
"""A directory that holds one of them holds a run."""
FOLDER_MODE = 0o700
"""What a run writes, its environment and its prompts, is its user's."""
STATE = "state.json"
"""In a checkpoint, written last."""


def make_run_folder(given: str, now: datetime | None = None) -> str | None:
    """Make the directory of a run, on its rank 0; return its absolute path, or None where the one given holds a run.

    given: run.dir; "": runs/<date>-<time>, with a number where another run that started in the same second has it.
    """
    for number in itertools.count(1):
        suffix = f"-{number}" if number > 1 else ""
        folder = Path(given or f"runs/{now or datetime.now():%Y%m%d-%H%M%S}{suffix}").resolve()
        folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            (folder / EVENTS).mkdir()  # of two runs at once, one can
            return None if (folder / CONFIG).exists() else str(folder)
        if given:
            break
    return None


def write_config(folder: Path, config: Config, device: Literal["cpu", "cuda"]) -> None:
    """Write the config of a run with the device that it runs on; once the transport is chosen, it is written again."""
    resolved = replace(config, engine=replace(config.engine, device=device))
    (folder / CONFIG).write_text(redact.text(to_toml(resolved)), encoding="utf-8")


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints step-N in a folder, by N; what is being written has another name."""
    found = [each for each in folder.glob("step-*") if each.name[5:].isdecimal() and (each / STATE).is_file()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step that is next in it."""
    return int(checkpoint.name[5:])


def checkpoint_to_resume(config: Config) -> Path | None:
    """Return the checkpoint that checkpoint.resume names, None for none.

    Raise ConfigError where it is no checkpoint, or of a step after the last one, or where this run's checkpoints would mix
    with another's. One after the last step is good: the final check follows.
    """
    wanted, run = config.checkpoint, config.run
    there, found = checkpoints_in(Path(wanted.folder).resolve()) if wanted.folder else [], None
    if wanted.resume == "latest":
        found = there[-1] if there else None
    elif wanted.resume:
        found = Path(wanted.resume).resolve()
        if found not in checkpoints_in(found.parent):
            names = ", ".join(each.name for each in checkpoints_in(found))
            hint = f"it has {names}; give one" if names else 'give a folder step-N, or "latest"'
            raise ConfigError(
                f'checkpoint.resume = "{wanted.resume}" is no checkpoint, a folder step-N with a file {STATE}; {hint}.'
            )
    if found and step_of(found) > run.steps and not run.epochs:
        raise ConfigError(f'checkpoint.resume = "{found}" is after the last of {run.steps} steps; raise run.steps.')
    if wanted.every and there and there[-1] != found:
        raise ConfigError(
            f"checkpoint.folder = {shown(wanted.folder)} holds {there[-1].name}, which this run does not resume: give another"
            ' folder, or checkpoint.resume = "latest".'
        )
    return found
