"""Save and resume: a folder step-N that transformers loads, and beside the model what the next step depends on.

    step-N/  config.json, the tokenizer, model.safetensors   the actor, in the engine's dtype
             shards/      parameters and AdamW's states of actor and critic, by torch.distributed.checkpoint
             state.json   step, the KL's coefficient, how far the schedules are
             config.toml  of the run that saved it

All else is a function of run.seed and the step: its prompts, minibatches, dropout and the engine's sampling.
"""

import dataclasses
import json
import os
import shutil
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from harness.cluster.world import all_gather
from harness.config.layers import ConfigError, build_config, read_layer, shown, to_toml
from harness.config.run_folder import CONFIG, FOLDER_MODE, STATE, checkpoints_in
from harness.ppo import Ppo
from harness.runtime import redact
from harness.trainer.learner import Learner

SHARDS = "shards"
FILE_MODE = 0o600
OTHERS_WRITE = 0o022


class StopSignal:
    """Whether SIGTERM has come to this process, which it does not end any more."""

    def __init__(self) -> None:
        self.received = False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.received = True

    def anywhere(self) -> bool:
        """Return whether it has come to any rank. A collective call of all ranks."""
        return any(all_gather(self.received))


@dataclasses.dataclass(kw_only=True, slots=True)
class Checkpoints:
    """The checkpoints of one run. Every method is a collective call of all ranks."""

    ppo: Ppo
    folder: Path
    """Of the folders step-N; all hosts see it."""
    source: Path
    """The model's own folder: its config and tokenizer are a checkpoint's too."""
    newest: Path | None = None
    """What this run saved last, or resumed from."""

    def save(self, step: int) -> None:
        """Save what step number `step` starts from, as the folder step-<step>.

        It is written under another name, to the disk, and renamed once every rank is done; then the oldest ones beyond
        checkpoint.keep go, but none of a later step, which an earlier run may have left.
        """
        ppo, target, started = self.ppo, self.folder_of(step), time.monotonic()
        partial = target.with_suffix(".partial")
        with (
            ppo.events.phase("save_checkpoint", waiting_for=f"all ranks to write {target}"),
            self._tensors() as tensors,
        ):
            if ppo.world.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(FOLDER_MODE, parents=True)
            dist.barrier()
            ppo.sync.save(partial, self.source, ppo.world.rank)
            dcp.save(tensors, checkpoint_id=partial / SHARDS)
            if ppo.world.rank == 0:
                (partial / CONFIG).write_text(redact.text(to_toml(ppo.config)), encoding="utf-8")
                (partial / STATE).write_text(json.dumps(self._state(step)), encoding="utf-8")
                _publish(partial, target)
                keep = ppo.config.checkpoint.keep
                earlier = [each for each in checkpoints_in(self.folder) if int(each.name[5:]) <= step]
                for old in earlier[:-keep] if keep else ():
                    shutil.rmtree(old)
            dist.barrier()
        self.newest = target
        ppo.events.say(f"saved {target} in {time.monotonic() - started:.1f} s")

    def folder_of(self, step: int) -> Path:
        """Return where that step is saved."""
        return self.folder / f"step-{step}"

    def how_to_resume(self) -> str:
        """Return it in words."""
        return f"resume with --checkpoint.resume {self.newest}" if self.newest else "no checkpoint was made yet"

    def resume(self, folder: Path) -> int:
        """Load a checkpoint into the parts of this run, whose world size may be another; return the step that is next.

        Raise ConfigError where others could have written to it, or it is of another model.
        """
        require_own(folder)
        ppo, state = self.ppo, json.loads((folder / STATE).read_text(encoding="utf-8"))
        with ppo.events.phase("load_checkpoint", waiting_for=f"all ranks to load {folder}"), self._tensors() as tensors:
            require_same_model(folder, tensors)
            dcp.load(tensors, checkpoint_id=folder / SHARDS)
        with warnings.catch_warnings(action="ignore"):  # of a schedule that steps before its optimizer
            for learner in self._learners():
                learner.schedule.last_epoch = state["optimizer_steps"][learner.role] - 1
                learner.schedule.step()
        ppo.kl_control.coefficient = state["kl_coefficient"]
        # As the run that saved it would have had it: less than what the first sync now moves.
        ppo.verification.movement = state["sync_movement"]
        ppo.verification.own_checkpoint = None  # the first sync does not bring the model's own weights
        self.newest, step = folder, int(state["step"])
        ppo.events.say(f"resumed from {folder}: step {step} is next")
        for sentence in self._changes(folder):
            ppo.events.say(f"warning: {sentence}")
        return step

    def _learners(self) -> list[Learner]:
        return [self.ppo.actor, *([self.ppo.critic] if self.ppo.critic else [])]

    @contextmanager
    def _tensors(self) -> Iterator[dict[str, Tensor]]:
        """Yield actor's and critic's tensors by name, in memory while this is open."""
        with ExitStack() as stack:
            for learner in self._learners():
                stack.enter_context(learner.learning())
            yield {name: each for learner in self._learners() for name, each in learner.tensors().items()}

    def _state(self, step: int) -> dict[str, object]:
        return {
            "step": step,
            "kl_coefficient": self.ppo.kl_control.coefficient,
            "sync_movement": self.ppo.verification.movement,
            "optimizer_steps": {learner.role: learner.schedule.last_epoch for learner in self._learners()},
        }

    def _changes(self, folder: Path) -> Iterator[str]:
        """Yield a sentence for each key that what follows depends on, and that the run which saved it had otherwise."""
        with suppress(ConfigError):  # a key of another release
            before = dataclasses.asdict(build_config([read_layer(str(folder / CONFIG))]))
            for section, values in dataclasses.asdict(self.ppo.config).items():
                for name, value in values.items():
                    was = before[section][name]
                    if value != was and section not in ("checkpoint", "network") and name != "dir":
                        yield f"{section}.{name} is {shown(value)}, and was {shown(was)} in the run that saved this checkpoint"


def require_own(folder: Path) -> None:
    """Raise ConfigError unless this user, or root, alone can have written a checkpoint: its metadata is unpickled."""
    for path in (folder, *folder.rglob("*")):
        found = path.lstat()
        if found.st_uid not in (os.getuid(), 0) or found.st_mode & OTHERS_WRITE or path.is_symlink():
            raise ConfigError(
                f"{path} must belong to user {os.getuid()}, be no link and be writable by nobody else, as a checkpoint can run"
                f" code; got owner {found.st_uid}, mode {found.st_mode & 0o777:o}; copy what you trust with `cp -rL`, and"
                " `chmod -R go-w` the copy."
            )


def require_same_model(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Raise ConfigError unless the checkpoint has these tensors, of these shapes and dtypes, and no other of their models."""
    metadata = dcp.FileSystemReader(folder / SHARDS).read_metadata().state_dict_metadata
    there = {
        name: f"{str(each.properties.dtype)[6:]} {list(each.size)}"
        for name, each in metadata.items()
        if isinstance(each, TensorStorageMetadata) and (name in tensors or name.startswith("actor/"))
    }
    here = {name: f"{str(each.dtype)[6:]} {list(each.shape)}" for name, each in tensors.items()}
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise ConfigError(
                f"checkpoint.resume = {shown(str(folder))} is of another model: {name} is {there.get(name, 'missing')} there,"
                f" {here.get(name, 'missing')} here; give the [model] and the algorithm.advantage of its {CONFIG}."
            )


def _publish(partial: Path, target: Path) -> None:
    """Bring the folder to the disk, its user's alone, and then give it its name; an earlier one of that name goes."""
    for path in (*partial.rglob("*"), partial):
        if path.is_file():
            path.chmod(FILE_MODE)
        _to_disk(path)
    if target.exists():  # a run that resumed from an earlier step comes here again
        old = target.with_suffix(".old")
        target.rename(old)
        shutil.rmtree(old)
    partial.rename(target)
    _to_disk(target.parent)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
