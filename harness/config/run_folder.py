"""The directory of a run: each run has its own, which no other user can read."""

import itertools
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Literal

from harness.config.layers import to_toml
from harness.config.schema import Config
from harness.runtime import redact

CONFIG, EVENTS = "config.toml", "events"
"""A directory that holds one of them holds a run."""
FOLDER_MODE = 0o700
"""What a run writes, its environment and its prompts, is its user's."""


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
