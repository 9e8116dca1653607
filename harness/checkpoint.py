"""Save and resume.

A checkpoint is a folder that transformers loads as a model, with the trainer's state in addition:

    step-N/  config.json, the tokenizer, model.safetensors   the actor, in the engine's dtype
             actor/, critic/   rankR.safetensors: that rank's shards of parameters and of AdamW's states
             config.toml       the config of the run that saved it
             state.json        the step, how far the schedules are, the number of ranks, checksums

Nothing in it is a pickle, so loading it runs no code. Everything else that a step depends on is a function of run.seed
and the step: its prompts, minibatches, dropout and the engine's sampling.
"""

import dataclasses
import fcntl
import os
import shutil
import signal
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.cluster.world import all_gather
from harness.config.checkpoint_folder import (
    STATE,
    CheckpointState,
    changes_since,
    check_file,
    checkpoints_in,
    checksum,
    damaged,
    read_state,
    shard_of,
)
from harness.config.layers import ConfigError, shown, to_redacted_toml
from harness.config.run_folder import CONFIG, FOLDER_MODE, make_private
from harness.config.schema import Config
from harness.runtime.events import EventLog
from harness.trainer.actor import Actor
from harness.trainer.critic import Critic
from harness.trainer.learner import Learner
from harness.trainer.offload import local
from harness.trainer.rows import own_rows
from harness.weights.sync import WeightSync
from harness.weights.verification.proof import Proof

LOCK = ".lock"
"""The file in checkpoint.folder that the run which saves there holds locked."""


class StopSignal:
    """Catches SIGTERM, so that the run can save a checkpoint before it ends."""

    def __init__(self) -> None:
        self.received = False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.received = True

    def anywhere(self) -> bool:
        """Return whether SIGTERM has come to any rank. A collective call of all ranks."""
        return any(all_gather(self.received))


def lock_folder(config: Config) -> int | None:
    """Lock checkpoint.folder if this run saves there. Return the descriptor that holds the lock, on rank 0. Collective.

    Two runs would delete each other's half-written checkpoints. Raise ConfigError on all ranks if another run has it.
    """
    lock: int | None = None
    problem = ""
    if config.checkpoint.every and config.checkpoint.folder and dist.get_rank() == 0:
        folder = Path(config.checkpoint.folder).resolve()
        try:
            make_private(folder)
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = "another run saves there; wait for its end, or give another folder"
        except OSError as error:
            problem = f"it cannot be used ({error.strerror}: {error.filename}); give another folder"
    if problem := all_gather(problem)[0]:
        raise ConfigError(f"checkpoint.folder = {shown(config.checkpoint.folder)}: {problem}.")
    return lock


@dataclasses.dataclass(kw_only=True, slots=True)
class Checkpoints:
    """The checkpoints of one run. Saving and resuming are collective calls of all ranks."""

    config: Config
    events: EventLog
    folder: Path
    """Holds the folders step-N; all hosts see it."""
    source: Path
    """The model's own folder, whose config and tokenizer go into each checkpoint."""
    actor: Actor
    critic: Critic | None
    sync: WeightSync
    proof: Proof
    newest: Path | None = None
    """What this run saved last, or resumed from."""

    @property
    def learners(self) -> list[Learner]:
        return [self.actor, self.critic] if self.critic else [self.actor]

    def save(self, step: int) -> None:
        """Save what step number `step` starts from, in the folder step-<step>; then delete the oldest beyond
        checkpoint.keep.

        All ranks write into step-<step>.partial, which is renamed when all of it is on the disk: a save that was
        interrupted is never taken for a checkpoint.
        """
        rank, target, started = dist.get_rank(), self.folder_of(step), time.monotonic()
        partial = target.with_suffix(".partial")
        with self.events.phase("save_checkpoint", waiting_for=f"all ranks to write {target}"):
            if rank == 0:
                for interrupted in self.folder.glob("step-*.partial"):
                    shutil.rmtree(interrupted)
                for made in (partial, *(partial / learner.role for learner in self.learners)):
                    made.mkdir(FOLDER_MODE, parents=True)
            dist.barrier()
            checksums = {}
            for learner in self.learners:
                with learner.learning():  # one after the other: on a GPU there may be no room for both
                    shards = {name: local(tensor).contiguous() for name, tensor in learner.tensors().items()}
                    file = shard_of(learner.role, rank)
                    save_file(shards, partial / file)
                    checksums[file] = checksum(partial / file)
            with self.actor.on_device():
                self.sync.save_model(partial, self.source)
            checksums = {name: each for of_rank in all_gather(checksums) for name, each in of_rank.items()}
            if rank == 0:
                (partial / CONFIG).write_text(to_redacted_toml(self.config), encoding="utf-8")
                checksums[CONFIG] = checksum(partial / CONFIG)
                (partial / STATE).write_text(self._state(step, checksums).to_json(), encoding="utf-8")
                _publish(partial, target)
                if keep := self.config.checkpoint.keep:
                    for old in checkpoints_in(self.folder)[:-keep]:
                        shutil.rmtree(old.rename(old.with_suffix(".partial")))
            dist.barrier()
        self.newest = target
        self.events.say(f"saved {target} in {time.monotonic() - started:.1f} s")

    def folder_of(self, step: int) -> Path:
        """Return where that step is saved."""
        return self.folder / f"step-{step}"

    def how_to_resume(self) -> str:
        """Return how to go on from the newest checkpoint, for a message."""
        return f"resume with --checkpoint.resume {self.newest}" if self.newest else "no checkpoint was made yet"

    def resume(self, folder: Path) -> int:
        """Load a checkpoint into the parts of this run, which may have another number of ranks; return the next step.

        Raise ConfigError if others could have written to it, if it is not as it was saved, or if its model or prompts
        differ.
        """
        with self.events.phase("load_checkpoint", waiting_for=f"all ranks to load {folder}"):
            state = read_state(folder)
            changes = changes_since(folder, self.config)
            for learner in self.learners:
                if learner.role not in state.optimizer_steps:
                    raise _another_model(folder, f"it has no {learner.role}")
                with learner.learning():
                    load_shards(folder, learner.role, state, learner.tensors())
                _set_schedule(learner, state.optimizer_steps[learner.role])
            self.proof.forget_own_load()
        self.newest = folder
        self.events.say(f"resumed from {folder}: step {state.step} is next")
        for sentence in changes:
            self.events.say(f"warning: {sentence}")
        return state.step

    def _state(self, step: int, checksums: dict[str, int]) -> CheckpointState:
        return CheckpointState(
            step=step,
            ranks=dist.get_world_size(),
            optimizer_steps={learner.role: learner.schedule.last_epoch for learner in self.learners},
            checksums=checksums,
        )


def load_shards(folder: Path, role: str, state: CheckpointState, tensors: Mapping[str, Tensor]) -> None:
    """Fill this rank's shards of the tensors of actor or critic from a checkpoint, which any number of ranks saved.

    Raise ConfigError for a file that is not as it was saved, or if the model differs.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with ExitStack() as stack:
        # With as many ranks as then, each needs its own file only.
        wanted = [shard_of(role, each) for each in ([rank] if state.ranks == world_size else range(state.ranks))]
        files = [stack.enter_context(_open_shard(folder, each, state)) for each in wanted]
        if different := sorted(set(files[0].keys()) ^ tensors.keys()):
            raise _another_model(folder, f"one of the two has no {different[0]}")
        for name, tensor in tensors.items():
            own, saved = local(tensor), files[0].get_tensor(name)
            expected = own.shape
            if state.ranks != world_size and isinstance(tensor, DTensor):
                saved, expected = torch.cat([file.get_tensor(name) for file in files]), tensor.shape
            if saved.shape != expected:
                raise _another_model(folder, f"{name} has shape {list(saved.shape)} there and {list(expected)} here")
            if saved.shape != own.shape:
                mine = own_rows(tensor)
                saved = saved[mine.start : mine.stop]
            own.copy_(saved)


def _open_shard(folder: Path, name: str, state: CheckpointState) -> Any:
    check_file(folder, name, state)
    try:
        return safe_open(folder / name, "pt")
    except (OSError, SafetensorError) as error:
        raise damaged(folder, name, f"cannot be read ({error})") from error


def _another_model(folder: Path, how: str) -> ConfigError:
    return ConfigError(
        f"checkpoint.resume: {folder} is of another model than this run: {how}. Use [model] and algorithm.advantage of its"
        f" {CONFIG}."
    )


def _set_schedule(learner: Learner, steps: int) -> None:
    """Bring the learning rate to where it is after so many optimizer steps.

    torch's schedules cannot be set to a step. But step() computes the learning rate of the step after last_epoch.
    """
    learner.schedule.last_epoch = steps - 1
    with warnings.catch_warnings(action="ignore"):  # torch warns of a schedule that steps before its optimizer
        learner.schedule.step()


def _publish(partial: Path, target: Path) -> None:
    """Make the files their user's alone and bring them to the disk; then give the folder its name."""
    for path in (*partial.rglob("*"), partial):
        if path.is_file():
            path.chmod(0o600)
        _to_disk(path)
    partial.rename(target)
    _to_disk(target.parent)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
