"""A step's responses in files, so that the engine and the trainer of a run can run apart (rollout.save,
rollout.load).
"""

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from operator import attrgetter
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from harness.config.layers import shown
from harness.config.rollout_folder import PATTERN, check_to_load, responses_of
from harness.config.schema import Config
from harness.trainer.batch import Batch

NOT_SAVED_KEYS = ("truncated", "save", "load", "only", "routing")
"""Keys of [rollout] that do not change what is saved; those of [task], and the others of [rollout], do."""
OTHER_KEYS = (
    "run.seed", "parallel.dp", "parallel.tp", "parallel.pp", "parallel.rank_order", "model.name", "model.overrides",
    "model.weights", "model.dtype",
)  # fmt: skip
"""Keys of other sections that do: they decide which rank has which responses, and which model made them."""


ROUTED = "routed_experts"
"""The one field of a batch that has more axes than [B, T]."""


@dataclass(frozen=True, slots=True)
class SavedRollouts:
    """The batches of one rank in a folder, one file for each step: FOLDER/step00002-rank0000.safetensors."""

    folder: Path
    rank: int
    made_for: dict[str, str]
    """Key -> value; must be the same in the run that saves and the run that loads."""
    routing: str = "off"
    """rollout.routing: unless it is off, what is loaded must have the engine's experts."""

    @classmethod
    def of(cls, config: Config, rank: int) -> "SavedRollouts | None":
        """Return the folder that rollout.load, or else rollout.save, names; None if neither does."""
        keys = [*OTHER_KEYS, *(f"task.{each.name}" for each in fields(config.task))]
        keys += [f"rollout.{each.name}" for each in fields(config.rollout) if each.name not in NOT_SAVED_KEYS]
        folder = config.rollout.load or config.rollout.save
        made_for = {key: shown(attrgetter(key)(config)) for key in keys}
        return cls(Path(folder), rank, made_for, config.rollout.routing) if folder else None

    def file(self, step: int) -> Path:
        """Return the file of this rank's responses of a step."""
        return responses_of(self.folder, step, self.rank)

    def save(self, step: int, batch: Batch) -> None:
        """Write a step's batch, under another name first: a file with its own name is complete.

        Delete this rank's files of later steps, which a run that ended after its last checkpoint may have left.
        """
        file = self.file(step)
        for other in self.folder.glob(f"step*-rank{self.rank:04}.safetensors"):
            number = other.name.removeprefix("step").partition("-")[0]
            if number.isdecimal() and int(number) > step:
                other.unlink()
        part = file.with_suffix(".part")
        save_file({name: tensor.contiguous() for name, tensor in batch.tensors().items()}, part, metadata=self.made_for)
        os.replace(part, file)

    def load(self, step: int) -> Batch:
        """Return a step's batch as it was saved.

        Raise ValueError if there is none, if it is from another kind of run, or if the file holds something else.
        """
        file = self.file(step)
        try:
            with safe_open(file, "pt") as opened:
                found = opened.metadata() or {}
                for key, mine in self.made_for.items():
                    if (theirs := found.get(key, "(not recorded)")) != mine:
                        raise ValueError(
                            f"{file} was saved with {key} = {theirs}, but this run has {mine}: use the saved value, or save"
                            " rollouts with this one in another folder"
                        )
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} cannot be read ({error}): give a folder that rollout.save wrote") from error
        if wrong := not_a_batch(tensors):
            raise ValueError(f"{file} holds no rollouts: {wrong}; save them again")
        if self.routing == "off":
            tensors.pop(ROUTED, None)
        elif ROUTED not in tensors:
            raise ValueError(
                f'{file} has no {ROUTED}, which rollout.routing = "{self.routing}" needs: use "off", or save rollouts with'
                ' rollout.routing = "record"'
            )
        return Batch(**tensors)

    def check(self, config: Config, first: int = 0) -> None:
        """Raise ValueError if a run from step `first` to run.steps cannot load from the folder, or continue what it
        holds.
        """
        if config.rollout.load:
            check_to_load(config, [self.rank], first)
            self.load(config.run.steps - 1)
        elif first and self.file(first - 1).exists():
            self.load(first - 1)
        elif list(self.folder.glob(PATTERN)):
            raise ValueError(f'rollout.save = "{self.folder}" holds rollouts of another run; give another folder')
        else:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f'rollout.save = "{self.folder}" cannot be made: {error.strerror}') from error


def not_a_batch(tensors: Mapping[str, Tensor]) -> str:
    """Return why these tensors do not make a batch; "" if they do."""
    needed = {each.name for each in fields(Batch) if each.default is MISSING}
    if foreign := sorted(tensors.keys() - {each.name for each in fields(Batch)}):
        return f"{', '.join(foreign)} {'are' if len(foreign) > 1 else 'is'} no part of a batch"
    if missing := sorted(needed - tensors.keys()):
        return f"it lacks {', '.join(missing)}"
    shape = tuple(tensors["input_ids"].shape)
    if len(shape) != 2:
        return f"input_ids must have the shape [B, T], got {list(shape)}"
    for name, tensor in tensors.items():
        if tuple(tensor.shape) not in (shape, shape[:1]) and (name != ROUTED or tensor.shape[:2] != shape):
            return f"{name} has the shape {list(tensor.shape)} and input_ids {list(shape)}"
    return ""
