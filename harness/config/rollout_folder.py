"""The folder of rollout.save and rollout.load: which files it has, and whether a run can load them, or save there.

Nothing here imports torch, so a folder that cannot be used is refused before any rank starts.
"""

from collections.abc import Iterable
from pathlib import Path

from harness.config.layers import ConfigError, shown
from harness.config.schema import Config

PATTERN = "step*.safetensors"


def responses_of(folder: Path, step: int, rank: int) -> Path:
    """Return the file of a rank's responses of a step."""
    return folder / f"step{step:05}-rank{rank:04}.safetensors"


def check_to_load(config: Config, ranks: Iterable[int], first: int = 0, *, steps_are_known: bool = True) -> None:
    """Raise ConfigError unless rollout.load has what these ranks need from step `first` on. Tensors are not read.

    steps_are_known: whether run.steps is what will run; with run.epochs only the task's rows tell.
    """
    given, folder, ranks = f"rollout.load = {shown(config.rollout.load)}", Path(config.rollout.load), list(ranks)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"{given} {what}; give the folder that a run with rollout.save wrote.")
    steps = range(first, config.run.steps if steps_are_known else first + 1)
    files = ((step, responses_of(folder, step, rank)) for step in steps for rank in ranks)
    step, missing = next(((step, file.name) for step, file in files if not file.is_file()), (0, ""))
    if missing and not any(folder.glob(PATTERN)):
        raise ConfigError(f"{given} has no rollouts ({missing} is not there); give a folder that rollout.save wrote.")
    if missing and step == first:
        mesh = "a run loads what as many ranks have saved, from its first step on"
        raise ConfigError(f"{given} lacks rollouts that this run needs: {missing} is not there, and {mesh}.")
    if missing:
        has = f"has the rollouts of {step} steps, and run.steps = {config.run.steps}: {missing} is not there"
        raise ConfigError(f"{given} {has}; use run.steps = {step}, or give a folder that has them.")


def check_to_save(config: Config) -> None:
    """Raise ConfigError if rollout.save holds rollouts of another run. A run that resumes may continue what it holds."""
    if not config.checkpoint.resume and any(Path(config.rollout.save).glob(PATTERN)):
        raise ConfigError(
            f"rollout.save = {shown(config.rollout.save)} holds rollouts of another run; give another folder."
        )
