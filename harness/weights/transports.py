"""Transports: the ways in which weights travel from trainer to engine, one class each.

`pull` is in weights/pull/. It is imported only when a run asks for it.
"""

import os
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, cast

import torch.distributed as dist

from harness.cluster.world import World, all_gather
from harness.config.layers import ConfigError
from harness.rollout.engine import PullableEngine, RolloutEngine
from harness.rollout.engine_ranks import together
from harness.weights.trainer_weights import TrainerWeights

SHARED_FOLDER_SECONDS = 10.0
"""How long a file system may take to show on one host what another one wrote."""


class Transport(Protocol):
    """One way of bringing all weights to the engine of this rank's group."""

    def send(self, weights: TrainerWeights) -> None:
        """Bring all weights to the engine and make it forget cached prefixes. A collective call of all ranks."""

    def close(self) -> None:
        """Give back what is kept between syncs. A collective call of all ranks, which may be repeated."""


class TensorTransport:
    """SGLang's own update call for each bucket. Every rank sends its copy to the TP rank next to it.

    SGLang's call does not work with several pipeline stages. There, VerlEngine calls load_weights in each scheduler
    instead.
    """

    def __init__(self, engine: RolloutEngine, load_format: Literal["flattened_bucket"] | None) -> None:
        """load_format: None sends named tensors, "flattened_bucket" one buffer."""
        self.engine = engine
        self.load_format = load_format

    def send(self, weights: TrainerWeights) -> None:
        with self.engine.weight_update():
            for bucket in weights.buckets:
                last = bucket is weights.buckets[-1]
                self.engine.update_weights_from_tensor(weights.gather(bucket), self.load_format, flush_cache=last)

    def close(self) -> None:
        pass


class DistributedTransport:
    """A broadcast from each engine's head to its TP ranks, which may be on other GPUs and hosts than the trainers."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    def send(self, weights: TrainerWeights) -> None:
        with self.engine.weight_update():
            for bucket in weights.buckets:
                last = bucket is weights.buckets[-1]
                self.engine.update_weights_from_distributed(weights.gather(bucket), flush_cache=last)

    def close(self) -> None:
        pass


class DiskTransport:
    """A checkpoint that rank 0 writes and every engine loads. It is deleted when all engines have loaded it."""

    def __init__(self, engine: RolloutEngine, parent: Path) -> None:
        """parent: a folder that all hosts see. Each sync makes a folder in it."""
        self.engine = engine
        self.parent = parent

    def send(self, weights: TrainerWeights) -> None:
        """Write, load and delete the checkpoint. A failure to write or to load raises on every rank.

        SGLang flushes the prefix cache itself after a load.
        """
        self.parent.mkdir(parents=True, exist_ok=True)
        make = partial(tempfile.TemporaryDirectory, prefix="weights-", dir=self.parent, ignore_cleanup_errors=True)
        with make() if dist.get_rank() == 0 else nullcontext("") as name:
            box = [name]
            dist.broadcast_object_list(box, src=0)
            together(lambda: weights.save(Path(box[0])), what="writing the checkpoint failed ")
            together(lambda: self.engine.update_weights_from_disk(box[0]), what="loading the checkpoint failed ")

    def close(self) -> None:
        pass


def make_transport(name: str, engine: RolloutEngine, folder: Path, *, offloaded: bool = False) -> Transport:
    """Return the transport of that name.

    folder: for disk, a folder that all hosts see. offloaded: the trainer's memory is given up between syncs, so a pull
    must not keep it open.
    """
    if name == "pull":
        from harness.weights.pull.transport import PullTransport  # no other transport needs it

        return PullTransport(cast(PullableEngine, engine), offloaded=offloaded)
    if name == "distributed":
        return DistributedTransport(engine)
    if name == "disk":
        return DiskTransport(engine, folder)
    if name in ("bucket", "tensor"):
        return TensorTransport(engine, "flattened_bucket" if name == "bucket" else None)
    raise ValueError(f'transport must be "bucket", "tensor", "pull", "distributed" or "disk", got "{name}".')


def check_shared(folder: Path, world: World, key: str) -> None:
    """Raise ConfigError on every rank if a host does not see what rank 0 writes. A collective call of all ranks.

    key: the setting to name in the message.
    """
    name = problem = ""
    if world.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, made = tempfile.mkstemp(prefix=".seen-", dir=folder)  # two runs may start at once
            os.close(descriptor)
            name = Path(made).name
        except OSError as error:
            problem = f"{key} must be a folder that can be written to, got {folder}: {error.strerror}."
    name, problem = all_gather((name, problem))[0]
    if problem:
        raise ConfigError(problem)
    note, deadline = folder / name, time.monotonic() + SHARED_FOLDER_SECONDS
    while not note.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = sorted({host for host, found in all_gather((world.host, note.exists())) if not found})
    if world.rank == 0:
        note.unlink(missing_ok=True)
    if blind:
        raise ConfigError(
            f"{key} must be a folder that all hosts share, got {folder}: what rank 0 wrote there is not there on"
            f" {', '.join(blind)}."
        )
