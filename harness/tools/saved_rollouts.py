"""A step's responses in a file, so that engine and learner can run apart."""

import os
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from harness.cluster.world import all_gather
from harness.config.layers import ConfigError, shown
from harness.config.run_folder import checkpoint_to_resume, step_of
from harness.config.schema import Config, Rollout
from harness.runtime.observer import Observer, RunContext
from harness.trainer.batch import Batch


@dataclass(frozen=True, slots=True)
class SavedRollouts:
    """The batches of one rank in a folder, FOLDER/step00002-rank0000.safetensors each."""

    folder: Path
    rank: int
    made_for: dict[str, str]
    """What a run that loads them must have alike."""

    @classmethod
    def of(cls, config: Config, rank: int) -> "SavedRollouts | None":
        """Return what rollout.load, or else rollout.save, names; None where neither does."""
        parallel, model, rollout = config.parallel, config.model, config.rollout
        made_for = {
            "mesh": f"dp {parallel.dp}, tp {parallel.tp}, pp {parallel.pp}, rank order {parallel.rank_order}",
            "model": f"{model.name} {shown(model.overrides)}",
            "size": f"{rollout.prompts_per_step} prompts of {rollout.responses_per_prompt} responses",
        }
        folder = rollout.load or rollout.save
        return cls(Path(folder), rank, made_for) if folder else None

    def file(self, step: int) -> Path:
        """Return where this rank's responses of a step are."""
        return self.folder / f"step{step:05}-rank{self.rank:04}.safetensors"

    def save(self, step: int, batch: Batch) -> None:
        """Write a step's batch, beside its place first: what is in its place is whole.

        Those of later steps go: a run that was ended after its last checkpoint left them.
        """
        file = self.file(step)
        for later in self.folder.glob(f"step*-rank{self.rank:04}.safetensors"):
            if later.name > file.name:
                later.unlink()
        part = file.with_suffix(".part")
        save_file({name: tensor.contiguous() for name, tensor in batch.tensors().items()}, part, metadata=self.made_for)
        os.replace(part, file)

    def load(self, step: int) -> Batch:
        """Return a step's batch, as it was saved. Raise ValueError where there is none, or one of another kind of run."""
        file = self.file(step)
        try:
            with safe_open(file, "pt") as opened:
                found = opened.metadata() or {}
                for name, mine in self.made_for.items():
                    if found.get(name) != mine:
                        theirs = found.get(name, "unknown")
                        raise ValueError(
                            f"{file} is of another {name} ({theirs}) than this run ({mine}): make them alike"
                        )
                return Batch(**{name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{file} cannot be read ({error}): run.steps must be at most the steps that were saved"
            ) from error

    def check(self, rollout: Rollout, steps: int, first: int = 0) -> None:
        """Raise ValueError where a run from step `first` to `steps` cannot load from the folder, or go on with what it holds."""
        if rollout.load:
            self.load(steps - 1)
        elif first and self.file(first - 1).exists():
            self.load(first - 1)
        elif list(self.folder.glob("step*.safetensors")):
            raise ValueError(f'rollout.save = "{self.folder}" holds rollouts of another run; give another folder')
        else:
            self.folder.mkdir(parents=True, exist_ok=True)


class RolloutWriter(Observer):
    """rollout.save: write each step's responses, a file for each step and rank."""

    saved: SavedRollouts | None = None

    def met(self, run: RunContext) -> None:
        """Raise ConfigError on every rank where the folder holds what would be lost."""
        self.saved, found = SavedRollouts.of(run.config, run.world.rank), ""
        try:
            if self.saved:
                resumed = checkpoint_to_resume(run.config)
                self.saved.check(run.config.rollout, run.config.run.steps, step_of(resumed) if resumed else 0)
        except ValueError as error:
            found = str(error)
        for sentence in filter(None, all_gather(found)):
            raise ConfigError(sentence)

    def responded(self, step: int, batch: Batch) -> None:
        if self.saved:
            self.saved.save(step, batch)
