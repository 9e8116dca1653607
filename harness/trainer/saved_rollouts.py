"""A step's responses in files, so that the engine and the trainer of a run can run apart (rollout.save, rollout.load)."""

import os
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from harness.config.layers import shown
from harness.config.schema import Config, Rollout
from harness.trainer.batch import Batch


@dataclass(frozen=True, slots=True)
class SavedRollouts:
    """The batches of one rank in a folder, one file for each step: FOLDER/step00002-rank0000.safetensors."""

    folder: Path
    rank: int
    made_for: dict[str, str]
    """Must be the same in the run that saves and the run that loads."""

    @classmethod
    def of(cls, config: Config, rank: int) -> "SavedRollouts | None":
        """Return the folder that rollout.load, or else rollout.save, names; None if neither does."""
        parallel, model, rollout = config.parallel, config.model, config.rollout
        made_for = {
            "mesh": f"dp {parallel.dp}, tp {parallel.tp}, pp {parallel.pp}, rank order {parallel.rank_order}",
            "model": f"{model.name} {shown(model.overrides)}",
            "size": f"{rollout.prompts_per_step} prompts of {rollout.responses_per_prompt} responses",
        }
        folder = rollout.load or rollout.save
        return cls(Path(folder), rank, made_for) if folder else None

    def file(self, step: int) -> Path:
        """Return the file of this rank's responses of a step."""
        return self.folder / f"step{step:05}-rank{self.rank:04}.safetensors"

    def save(self, step: int, batch: Batch) -> None:
        """Write a step's batch, under another name first: a file with its own name is complete.

        Delete this rank's files of later steps, which a run that ended after its last checkpoint may have left.
        """
        file = self.file(step)
        for later in self.folder.glob(f"step*-rank{self.rank:04}.safetensors"):
            if later.name > file.name:
                later.unlink()
        part = file.with_suffix(".part")
        save_file({name: tensor.contiguous() for name, tensor in batch.tensors().items()}, part, metadata=self.made_for)
        os.replace(part, file)

    def load(self, step: int) -> Batch:
        """Return a step's batch as it was saved. Raise ValueError if there is none, or if it is from another kind of run."""
        file = self.file(step)
        try:
            with safe_open(file, "pt") as opened:
                found = opened.metadata() or {}
                for name, mine in self.made_for.items():
                    if found.get(name) != mine:
                        theirs = found.get(name, "unknown")
                        raise ValueError(f"{file} was saved with another {name} ({theirs}) than this run's ({mine})")
                return Batch(**{name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{file} cannot be read ({error}): run.steps must be at most the number of steps that were saved"
            ) from error

    def check(self, rollout: Rollout, steps: int, first: int = 0) -> None:
        """Raise ValueError if a run from step `first` to `steps` cannot load from the folder, or continue what it holds."""
        if rollout.load:
            self.load(steps - 1)
        elif first and self.file(first - 1).exists():
            self.load(first - 1)
        elif list(self.folder.glob("step*.safetensors")):
            raise ValueError(f'rollout.save = "{self.folder}" holds rollouts of another run; give another folder')
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
