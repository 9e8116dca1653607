"""Save and resume: a folder step-N that transformers loads, and beside the model what the next step depends on.

    step-N/  config.json, the tokenizer, model.safetensors   the actor, in the engine's dtype
             actor/, critic/   rankR.safetensors: that rank's part of parameters and AdamW's states
             state.json   step, shapes of these tensors, the KL's coefficient, how far the schedules are, the config
             config.toml  the same config, for reading

All else is a function of run.seed and the step: its prompts, minibatches, dropout and the engine's sampling.
"""

import dataclasses
import json
import os
import shutil
import signal
import time
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.cluster.world import all_gather
from harness.config.layers import ConfigError, shown, to_toml
from harness.config.run_folder import CONFIG, FOLDER_MODE, STATE, checkpoints_in
from harness.ppo import Ppo
from harness.runtime import redact
from harness.trainer.learner import Learner
from harness.trainer.offload import local

SHARD = "rank{:04}.safetensors"
FILE_MODE = 0o600
OTHERS_WRITE = 0o022
WHICH_PROMPTS = ("run.seed", "rollout.prompts_per_step")
"""Keys that, with those of [task], say which prompts a step has."""


_Toml = Mapping[str, Mapping[str, object]]


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
        checkpoint.keep go.
        """
        ppo, rank, target, started = self.ppo, self.ppo.world.rank, self.folder_of(step), time.monotonic()
        partial, tensors = target.with_suffix(".partial"), {}
        with ppo.events.phase("save_checkpoint", waiting_for=f"all ranks to write {target}"):
            if rank == 0:
                for left in self.folder.glob("step-*.partial"):
                    shutil.rmtree(left)
                for folder in (partial, *(partial / learner.role for learner in self._learners())):
                    folder.mkdir(FOLDER_MODE, parents=True)
            dist.barrier()
            for learner in self._learners():  # on a GPU there may be no room for both
                with learner.learning():
                    held = learner.tensors()
                    shards = {name: local(tensor).contiguous() for name, tensor in held.items()}
                    save_file(shards, partial / learner.role / SHARD.format(rank))
                tensors[learner.role] = shapes(held)
            with ppo.actor.on_device():
                ppo.sync.save(partial, self.source, rank)
            dist.barrier()
            if rank == 0:
                config, ranks = self._config(), dist.get_world_size()
                state = self._state(step) | {"ranks": ranks, "tensors": tensors, "config": tomllib.loads(config)}
                (partial / CONFIG).write_text(config, encoding="utf-8")
                (partial / STATE).write_text(json.dumps(state), encoding="utf-8")
                _publish(partial, target)
                keep = ppo.config.checkpoint.keep
                for old in checkpoints_in(self.folder)[:-keep] if keep else ():
                    shutil.rmtree(old.rename(old.with_suffix(".partial")))
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

        Raise ConfigError where others could have written to it, it cannot be read, or is of another model or other prompts.
        """
        require_own(folder)
        ppo = self.ppo
        with ppo.events.phase("load_checkpoint", waiting_for=f"all ranks to load {folder}"):
            try:
                state = json.loads((folder / STATE).read_text(encoding="utf-8"))
                changes = list(config_changes(folder, state["config"], tomllib.loads(self._config())))
                for learner in self._learners():
                    with learner.learning():
                        tensors = learner.tensors()
                        require_same_model(folder, state["tensors"].get(learner.role, {}), shapes(tensors))
                        load_shards(folder / learner.role, state["ranks"], tensors)
            except (OSError, KeyError, json.JSONDecodeError, SafetensorError) as error:
                raise ConfigError(f"{folder} cannot be read ({error!r}); resume an earlier one.") from error
        for learner in self._learners():
            learner.schedule.last_epoch = state["optimizer_steps"][learner.role] - 1
            with warnings.catch_warnings(action="ignore"):  # of a schedule that steps before its optimizer
                learner.schedule.step()
        ppo.kl_control.coefficient = state["kl_coefficient"]
        # As the run that saved it would have had it: less than what the first sync now moves.
        ppo.verification.movement = state["sync_movement"]
        ppo.verification.own_checkpoint = None  # the first sync does not bring the model's own weights
        self.newest, step = folder, int(state["step"])
        ppo.events.say(f"resumed from {folder}: step {step} is next")
        for sentence in changes:
            ppo.events.say(f"warning: {sentence}")
        return step

    def _learners(self) -> list[Learner]:
        return [self.ppo.actor, *([self.ppo.critic] if self.ppo.critic else [])]

    def _state(self, step: int) -> dict[str, object]:
        return {
            "step": step,
            "kl_coefficient": self.ppo.kl_control.coefficient,
            "sync_movement": self.ppo.verification.movement,
            "optimizer_steps": {learner.role: learner.schedule.last_epoch for learner in self._learners()},
        }

    def _config(self) -> str:
        return redact.text(to_toml(self.ppo.config))


def config_changes(folder: Path, before: _Toml, now: _Toml) -> Iterator[str]:
    """Yield a sentence for each key that what follows depends on, and that the run which saved the checkpoint had otherwise.

    Raise ConfigError where other prompts would follow.
    """
    for section, values in now.items():
        for name, value in values.items():
            key, was = f"{section}.{name}", before.get(section, {}).get(name, value)
            if value == was or section in ("checkpoint", "network", "trackers") or name == "dir":
                continue
            if section == "task" or key in WHICH_PROMPTS:
                raise ConfigError(
                    f"{key} = {shown(value)} gives other prompts than the run that saved {folder}, which had {shown(was)};"
                    f" give that, or start a new run from its weights, --model.name {folder}."
                )
            yield f"{key} is {shown(value)}, and was {shown(was)} in the run that saved this checkpoint"


def require_own(folder: Path) -> None:
    """Raise ConfigError unless this user, or root, alone can have written a checkpoint."""
    for path in (folder, *folder.rglob("*")):
        found = path.lstat()
        if found.st_uid not in (os.getuid(), 0) or found.st_mode & OTHERS_WRITE or path.is_symlink():
            raise ConfigError(
                f"{path} must belong to user {os.getuid()}, be no link and be writable by nobody else;"
                f" got owner {found.st_uid}, mode {found.st_mode & 0o777:o}; copy what you trust with `cp -rL`, and"
                " `chmod -R go-w` the copy."
            )


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return dtype and whole shape of each."""
    return {name: f"{str(each.dtype)[6:]} {list(each.shape)}" for name, each in tensors.items()}


def require_same_model(folder: Path, there: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Raise ConfigError unless the tensors of a checkpoint and of this run's model are of the same names and shapes."""
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise ConfigError(
                f"checkpoint.resume = {shown(str(folder))} is of another model: {name} is {there.get(name, 'missing')} there,"
                f" {here.get(name, 'missing')} here; give the [model] and the algorithm.advantage of its {CONFIG}."
            )


def load_shards(folder: Path, saved_by: int, tensors: Mapping[str, Tensor]) -> None:
    """Fill this rank's parts of the tensors from those of so many ranks. FSDP2 divides rows as torch.chunk does."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with ExitStack() as stack:
        of_ranks = [rank] if saved_by == ranks else range(saved_by)
        files = [stack.enter_context(safe_open(folder / SHARD.format(each), "pt")) for each in of_ranks]
        for name, tensor in tensors.items():
            own = local(tensor)
            if saved_by == ranks or not isinstance(tensor, DTensor):
                own.copy_(files[0].get_tensor(name))
            else:
                first = rank * -(-len(tensor) // ranks)
                own.copy_(torch.cat([file.get_tensor(name) for file in files])[first : first + len(own)])


def _publish(partial: Path, target: Path) -> None:
    """Bring the folder to the disk, its user's alone, and then give it its name."""
    for path in (*partial.rglob("*"), partial):
        if path.is_file():
            path.chmod(FILE_MODE)
        _to_disk(path)
    partial.rename(target)
    _to_disk(target.parent)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
