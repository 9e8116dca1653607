"""The folder of a checkpoint: which there are, what their state.json says, and whether they are as they were saved.

Nothing here imports torch, so a damaged checkpoint is refused before any rank starts.
"""

import json
import os
import stat
import tomllib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from harness.config.layers import ConfigError, shown, to_redacted_toml
from harness.config.run_folder import CONFIG
from harness.config.schema import Config

STATE = "state.json"
"""The file of a checkpoint that is written last: with it, the checkpoint is complete."""
ROLES = ("actor", "critic")
OTHERS_WRITE = 0o022
PROMPT_KEYS = ("run.seed", "rollout.prompts_per_step")
"""With all keys of [task], these decide which prompts a step has."""
FREE_SECTIONS = ("checkpoint", "network", "trackers")
"""Sections that may differ between the run that saved a checkpoint and the run that resumes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointState:
    """What state.json says of the checkpoint step-<step>."""

    step: int
    """The step that a run continues with."""
    ranks: int
    """How many ranks saved it."""
    optimizer_steps: dict[str, int]
    """For actor and critic, if there is one: the number of optimizer steps so far."""
    checksums: dict[str, int]
    """CRC-32 of config.toml and of each shard, by path in the folder."""

    def to_json(self) -> str:
        """Return the text of state.json, which ends in a checksum of the rest."""
        return json.dumps(asdict(self) | {"checksum": _checksum_of(asdict(self))})

    def is_consistent(self) -> bool:
        """Return whether the fields have their types, and whether there is one shard for each rank of actor and
        critic.
        """
        if not isinstance(self.optimizer_steps, dict) or not isinstance(self.checksums, dict):
            return False
        numbers = [self.step, self.ranks, *self.optimizer_steps.values(), *self.checksums.values()]
        if not all(type(number) is int and number >= 0 for number in numbers):
            return False
        if "actor" not in self.optimizer_steps or not {*self.optimizer_steps} <= {*ROLES}:
            return False
        if self.ranks * len(self.optimizer_steps) + 1 != len(self.checksums):
            return False
        shards = {shard_of(role, rank) for role in self.optimizer_steps for rank in range(self.ranks)}
        return {*self.checksums} == shards | {CONFIG}


def shard_of(role: str, rank: int) -> str:
    """Return the path of a rank's shard in the folder of a checkpoint."""
    return f"{role}/rank{rank:04}.safetensors"


def read_state(folder: Path) -> CheckpointState:
    """Return what the state.json of a checkpoint says.

    Raise ConfigError if others could have written to the checkpoint, if state.json or config.toml is not as it was
    saved, or if a shard is missing. What the shards hold is compared where they are loaded: they may be large.
    """
    require_own(folder)
    try:
        table = json.loads((folder / STATE).read_text(encoding="utf-8"))
        is_whole = isinstance(table, dict) and table.pop("checksum", None) == _checksum_of(table)
    except (ValueError, RecursionError) as error:
        raise damaged(folder, STATE, "is not JSON") from error
    except OSError as error:
        raise damaged(folder, STATE, f"cannot be read ({error.strerror})") from error
    if not is_whole:
        raise damaged(folder, STATE, "is not as it was saved")
    if {*table} != {each.name for each in fields(CheckpointState)}:
        raise damaged(folder, STATE, "was written by another version of this program")
    state = CheckpointState(**table)
    if not state.is_consistent():
        raise damaged(folder, STATE, "contradicts itself")
    if state.step != step_of(folder):
        raise damaged(folder, STATE, f"is of step {state.step}")
    for name in state.checksums:
        if not (folder / name).is_file():
            raise damaged(folder, name, "is missing")
    check_file(folder, CONFIG, state)
    return state


def check_file(folder: Path, name: str, state: CheckpointState) -> None:
    """Raise ConfigError unless a file of the checkpoint is as it was saved."""
    try:
        found = checksum(folder / name)
    except OSError as error:
        raise damaged(folder, name, f"cannot be read ({error.strerror})") from error
    if found != state.checksums[name]:
        raise damaged(folder, name, "is not as it was saved")


def changes_since(folder: Path, config: Config) -> list[str]:
    """Return a sentence for each key that matters and that the run which saved the checkpoint had set differently.

    Raise ConfigError if the steps would get other prompts, or if the checkpoint's config.toml is not one.
    """
    try:
        before = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise damaged(folder, CONFIG, "is not TOML") from error
    return list(config_changes(folder, before, tomllib.loads(to_redacted_toml(config))))


def config_changes(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each key that matters and that the run which saved the checkpoint had set differently.

    Raise ConfigError if the steps would get other prompts.
    """
    for section, values in now.items():
        for name, value in values.items():
            key, was = f"{section}.{name}", before.get(section, {}).get(name, value)
            if value == was or section in FREE_SECTIONS or key == "run.dir":
                continue
            if section == "task" or key in PROMPT_KEYS:
                raise ConfigError(
                    f"{key} = {shown(value)} would change the prompts: {folder} was saved with {shown(was)}. Use that, or start"
                    f" a new run from its weights with --model.name {folder}."
                )
            yield f"{key} is {shown(value)}, and was {shown(was)} in the run that saved this checkpoint"


def damaged(folder: Path, name: str, why: str) -> ConfigError:
    """Return the error for a file of a checkpoint, which says how to go on."""
    earlier = [each for each in checkpoints_in(folder.parent) if step_of(each) < step_of(folder)]
    then = f"resume {earlier[-1].name}, the one before" if earlier else "start anew: there is no earlier one"
    return ConfigError(f"{folder / name} {why}; move {folder.name} out of {folder.parent} and {then}.")


def require_own(folder: Path) -> None:
    """Raise ConfigError unless the checkpoint is folders and files that only this user, or root, can have written."""
    for path in (folder, *folder.rglob("*")):
        found = path.lstat()
        if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
            raise damaged(folder, str(path.relative_to(folder)), "is neither a file nor a folder")
        if found.st_uid not in (os.getuid(), 0) or found.st_mode & OTHERS_WRITE or path.is_symlink():
            raise ConfigError(
                f"{path} must belong to user {os.getuid()} and be writable by nobody else, and must not be a link; got owner"
                f" {found.st_uid}, mode {found.st_mode & 0o777:o}. If you trust it, copy it with `cp -rL` and run"
                " `chmod -R go-w` on the copy."
            )


def checksum(file: Path) -> int:
    """Return the CRC-32 of a file, against accidents: others cannot write to a checkpoint."""
    found = 0
    with file.open("rb") as stream:
        while part := stream.read(1 << 24):
            found = zlib.crc32(part, found)
    return found


def _checksum_of(table: object) -> int:
    return zlib.crc32(json.dumps(table, sort_keys=True).encode())


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints step-N of a folder, ordered by N. One that is still being written has another name."""
    return [each for each in _steps_in(folder) if os.path.lexists(each / STATE)]


def _steps_in(folder: Path) -> list[Path]:
    return sorted((each for each in folder.glob("step-*") if each.name[5:].isdecimal()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the number of the step that a run continues with from this checkpoint."""
    return int(checkpoint.name[5:])


def checkpoint_to_resume(config: Config, *, steps_are_known: bool = True) -> Path | None:
    """Return the checkpoint that checkpoint.resume names, or None.

    steps_are_known: whether run.steps is what will run; with run.epochs only the task's rows tell.

    Raise ConfigError if it is not a checkpoint or is damaged, if its steps had other prompts, if the run has fewer
    steps, or if this run would save into a folder of checkpoints that are newer. A checkpoint of the last step is fine:
    only the final check follows.
    """
    wanted, run = config.checkpoint, config.run
    folder = Path(wanted.folder).resolve() if wanted.folder else None
    there, found = checkpoints_in(folder) if folder else [], None
    steps = _steps_in(folder) if folder else []
    if steps and steps[-1:] != there[-1:] and (wanted.every or wanted.resume == "latest"):
        raise damaged(steps[-1], STATE, "is missing")
    if wanted.resume == "latest":
        found = there[-1] if there else None
    elif wanted.resume:
        found = Path(wanted.resume).resolve()
        if found not in checkpoints_in(found.parent):
            names = ", ".join(each.name for each in checkpoints_in(found))
            hint = f"it has {names}; give one" if names else 'give a folder step-N, or "latest"'
            raise ConfigError(
                f'checkpoint.resume = "{wanted.resume}" is not a checkpoint (a folder step-N with a file {STATE}); {hint}.'
            )
    if found and step_of(found) > run.steps and steps_are_known:
        raise ConfigError(
            f'checkpoint.resume = "{found}" is from after step {run.steps}, the last one; raise run.{"epochs" if run.epochs else "steps"}.'
        )
    if wanted.every and there and there[-1] != found:
        raise ConfigError(
            f"checkpoint.folder = {shown(wanted.folder)} holds {there[-1].name}, which is newer than what this run"
            ' starts from; give another folder, or checkpoint.resume = "latest".'
        )
    if found:
        read_state(found)
        changes_since(found, config)
    return found
