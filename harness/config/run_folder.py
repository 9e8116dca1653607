"""The directory of a run, which no other user can read."""

import errno
import itertools
import os
import stat
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Literal

from harness.config.layers import ConfigError, shown, to_redacted_toml
from harness.config.schema import Config

CONFIG, EVENTS = "config.toml", "events"
"""A directory with one of these belongs to a run."""
FOLDER_MODE = 0o700
"""Only the user may read what a run writes: it includes the environment and the prompts."""


def make_run_folder(given: str, now: datetime | None = None) -> str | None:
    """Make the directory of a run and return its absolute path, or None if it holds a run already. Called on rank 0.

    given: run.dir. If it is empty the directory is runs/<date>-<time>, with a number if another run of the same second
    has taken it. Raise OSError if it cannot be made, or if somebody else could put files into it.
    """
    for number in itertools.count(1):
        suffix = f"-{number}" if number > 1 else ""
        folder = Path(given or f"runs/{now or datetime.now():%Y%m%d-%H%M%S}{suffix}").resolve()
        make_private(folder)
        if why := open_to_others(folder):
            raise PermissionError(errno.EPERM, why, str(folder))
        with suppress(FileExistsError):
            (folder / EVENTS).mkdir(FOLDER_MODE)  # of two runs at once, one can
            return None if (folder / CONFIG).exists() else str(folder)
        if given:
            break
    return None


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone. One that exists stays as it is."""
    # One by one: mkdir(parents=True) gives the folders above the mode that the umask leaves.
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(FOLDER_MODE, exist_ok=True)


def open_to_others(folder: Path) -> str:
    """Return how somebody else could read or redirect what a run writes to this folder; "" if nobody can.

    A run makes no links. If the folder holds one, somebody else may have put it there, and the run would write to the
    file that it points to.
    """
    status = folder.stat()
    if status.st_uid != os.geteuid():
        return "it belongs to another user"
    if status.st_mode & 0o077:
        return f"others may use it (its mode is {stat.S_IMODE(status.st_mode):o}; chmod 700 it)"
    link = next((each.name for each in folder.iterdir() if each.is_symlink()), "")
    return f"it holds a link, {link}" if link else ""


def check_run_folder(given: str) -> None:
    """Raise ConfigError if run.dir cannot be made, holds a run already, or is open to others. Do not make it."""
    if not given:
        return check_writable("run.dir", "runs")  # which make_run_folder makes one in
    folder = Path(given).resolve()
    if (folder / CONFIG).exists() or (folder / EVENTS).exists():
        raise ConfigError(f"run.dir = {shown(given)} holds an earlier run; give another folder, or remove it.")
    if folder.is_dir() and (why := open_to_others(folder)):
        raise ConfigError(f"run.dir = {shown(given)} cannot be used: {why}; give another folder.")
    check_writable("run.dir", given)


def check_writable(key: str, given: str) -> None:
    """Raise ConfigError if a run could not make the folder that this key names, or not write to it. Do not make it."""
    folder = Path(given).resolve()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    what = "written to" if there == folder else "made"
    if not there.is_dir():
        raise ConfigError(f"{key} = {shown(given)} cannot be {what}: {there} is a file; give another folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{key} = {shown(given)} cannot be {what}: you may not write to {there}; give another folder."
        )


def write_config(folder: Path, config: Config, device: Literal["cpu", "cuda"]) -> None:
    """Write the config of a run, with the device that it runs on. Written again once the config is resolved."""
    resolved = replace(config, engine=replace(config.engine, device=device))
    (folder / CONFIG).write_text(to_redacted_toml(resolved), encoding="utf-8")
