"""The directory of a run: each run has its own, which no other user can read."""

import itertools
import json
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Literal

from harness.config.layers import ConfigError, to_toml
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
    return sorted(found, key=lambda each: int(each.name[5:]))


def checkpoint_to_resume(config: Config) -> Path | None:
    """Return the checkpoint that checkpoint.resume names, None for none.

    Raise ConfigError where it is no checkpoint, or made run.steps steps.
    """
    wanted = config.checkpoint.resume
    if not wanted:
        return None
    latest, run = wanted == "latest", config.run
    there = checkpoints_in(Path(config.checkpoint.folder if latest else wanted).resolve())
    if latest and not there:
        return None
    found = there[-1] if latest else Path(wanted).resolve()
    if not (found / STATE).is_file():
        names = ", ".join(each.name for each in there)
        hint = f"it has {names}; give one" if names else 'give a folder step-N, or "latest"'
        raise ConfigError(f'checkpoint.resume = "{wanted}" is no checkpoint, which has a file {STATE}; {hint}.')
    step = json.loads((found / STATE).read_text(encoding="utf-8"))["step"]
    if step >= run.steps and not run.epochs:
        raise ConfigError(f'checkpoint.resume = "{found}" is after step {step} of {run.steps}; raise run.steps.')
    return found
