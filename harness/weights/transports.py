"""The ways in which weights travel from trainer to engine, one class each, and the choice between them.

All but the pull take buckets one after the other, each gathered whole on every rank, in one call of the engine.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from harness.cluster.world import World, all_gather
from harness.config import schema
from harness.config.layers import ConfigError
from harness.config.rules import check_transport
from harness.config.schema import TransportName
from harness.rollout.engine_ranks import together
from harness.rollout.sglang_api import SGLangApi
from harness.rollout.verl_engine import VerlEngine
from harness.weights.gather import Bucket
from harness.weights.pull.link import PullLink
from harness.weights.update_group import UpdateGroup

SHARED_FOLDER_SECONDS = 10.0
"""How long a file system may take to show on one host what another one wrote."""

Gather = Callable[[Bucket], list[tuple[str, torch.Tensor]]]
"""Return full, contiguous tensors under their checkpoint names; a collective call of the trainer's ranks."""


class Transport(Protocol):
    """One way of bringing all weights to the engine of this rank's group."""

    def push(self, buckets: Sequence[Bucket], gather: Gather) -> None:
        """Sync once, wholly; a collective call of all ranks. The prefix cache is flushed with the last bucket."""

    def close(self) -> None:
        """Give back what it keeps between syncs, if anything; a collective call."""
        return


@dataclass(frozen=True, slots=True)
class TensorTransport(Transport):
    """SGLang's own update call for each bucket, as named tensors or one buffer: each rank's for the TP rank beside it."""

    engine: VerlEngine
    flattened: bool = False

    def push(self, buckets: Sequence[Bucket], gather: Gather) -> None:
        load_format = "flattened_bucket" if self.flattened else None
        with self.engine.weight_update():
            for bucket in buckets:
                flush_cache = bucket is buckets[-1]
                self.engine.update_weights_from_tensor(gather(bucket), load_format, flush_cache=flush_cache)


@dataclass(frozen=True, slots=True)
class PullTransport(Transport):
    """Each scheduler copies its own shards out of the trainers' memory: nothing is gathered, and no bucket is made."""

    engine: VerlEngine
    link: PullLink

    def push(self, buckets: Sequence[Bucket], gather: Gather) -> None:
        self.link.pull()
        if self.engine.has_prefixes:  # a flush is an engine call, which takes longer than the pull
            self.engine.flush_cache()


@dataclass(frozen=True, slots=True)
class DistributedTransport(Transport):
    """A broadcast from each engine's head to its TP ranks, which may be on other GPUs and hosts than the trainers."""

    engine: VerlEngine
    group: UpdateGroup

    def push(self, buckets: Sequence[Bucket], gather: Gather) -> None:
        with self.engine.weight_update():
            for bucket in buckets:
                self.group.broadcast(gather(bucket), flush_cache=bucket is buckets[-1])

    def close(self) -> None:
        self.group.close()


@dataclass(frozen=True, slots=True)
class DiskTransport(Transport):
    """A checkpoint that rank 0 writes and every engine loads, deleted when all have."""

    engine: VerlEngine
    parent: Path
    """All hosts see it; each sync writes a folder of its own there."""
    save: Callable[[Path], None]
    """Write the trainer's weights into an empty folder; a collective call of all ranks."""

    def push(self, buckets: Sequence[Bucket], gather: Gather) -> None:
        """Let `save` gather and write; SGLang flushes the prefix cache after a load by itself.

        A failure to write or load raises on every rank; what was written is deleted all the same.
        """
        self.parent.mkdir(parents=True, exist_ok=True)
        make = partial(tempfile.TemporaryDirectory, prefix="weights-", dir=self.parent, ignore_cleanup_errors=True)
        with make() if dist.get_rank() == 0 else nullcontext("") as name:
            box = [name]
            dist.broadcast_object_list(box, src=0)
            together(lambda: self.save(Path(box[0])), what="writing the checkpoint failed ")
            together(lambda: self.engine.update_weights_from_disk(box[0]), what="loading the checkpoint failed ")


def default_transport(api: SGLangApi) -> Literal["bucket", "tensor"]:
    """Return how SGLang's own update call takes weights: as a flattened bucket, in older releases as named tensors."""
    return "bucket" if api.bucket_mixes_dtypes else "tensor"


def choose_transport(
    config: schema.Config, api: SGLangApi, device: Literal["cpu", "cuda"]
) -> tuple[TransportName, str]:
    """Resolve weights.transport; return its name, and why it is this one. "auto" is SGLang's own update call.

    Raise ConfigError for a transport that the devices or this sglang do not allow.
    """
    check_transport(config, device)
    name, reason = config.weights.transport, "set in the config"
    if config.parallel.pp > 1 and not api.custom_weight_loader and name != "disk":
        raise ConfigError(
            f"parallel.pp = {config.parallel.pp} cannot work: sglang {api.version} hands the first stage's tensors to every"
            ' stage, and has no custom weight loaders (0.4.8) to mend that; use 1, or weights.transport = "disk".'
        )
    if name == "auto" and config.engine.implementation == "sglang":
        name, reason = "tensor", "auto: sglang's own VerlEngine takes named tensors only"
    elif name == "auto" and not config.parallel.colocate:
        name, reason = "distributed", "auto: parallel.colocate is false"
    elif name == "auto":
        name = default_transport(api)
        has = "takes" if name == "bucket" else "has no"
        reason = f"auto: sglang {api.version} {has} flattened buckets"
    needs = {
        "pull": (api.custom_weight_loader, 'custom weight loaders, which came with 0.4.8; use "tensor"'),
        "bucket": (api.bucket_mixes_dtypes, 'flattened buckets of any dtypes, which came with 0.5.6; use "tensor"'),
        "distributed": (
            "names" in api.distributed_update_parameters,
            'broadcasts of several tensors, which came with 0.4.9; use "disk"',
        ),
    }
    has_it, what = needs.get(name, (True, ""))
    if not has_it:
        raise ConfigError(f'weights.transport = "{name}" cannot work: sglang {api.version} has no {what}.')
    return name, reason


def check_shared(folder: Path, world: World, key: str) -> None:
    """Raise ConfigError, on every rank, when a host does not see what rank 0 writes; key names the setting. Collective."""
    note = folder / ".seen"
    if world.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        note.touch()
    dist.barrier()
    deadline = time.monotonic() + SHARED_FOLDER_SECONDS
    while not note.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = sorted({host for host, found in all_gather((world.host, note.exists())) if not found})
    if world.rank == 0:
        note.unlink()
    if blind:
        raise ConfigError(
            f"{key} must be a folder that all hosts share, got {folder}: as rank 0 sees it, it is not there on"
            f" {', '.join(blind)}."
        )
