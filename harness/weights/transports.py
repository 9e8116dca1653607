"""The ways in which weights travel from trainer to engine, one class each, and the choice between them.

All but the stream take buckets one after the other, each gathered whole on every rank. What fuses on arrival is in one
bucket, and a bucket is one call of the engine.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from harness.cluster.world import all_gather
from harness.config import schema
from harness.config.layers import ConfigError
from harness.config.rules import check_transport
from harness.config.schema import TransportName
from harness.rollout import sglang_api
from harness.rollout.engine_errors import EngineFailed
from harness.rollout.sglang_api import SGLangApi
from harness.rollout.verl_engine import VerlEngine
from harness.weights.gather import Bucket, gather_into
from harness.weights.stream.weight_link import WeightLink
from harness.weights.update_group import UpdateGroup

T = TypeVar("T")

Gathered = list[tuple[str, torch.Tensor]]
"""Full, contiguous tensors under their checkpoint names."""

Gather = Callable[[Bucket], Gathered]
"""A collective call of the trainer's ranks."""


class Transport(Protocol):
    """One way of bringing all weights to the engine of this rank's group."""

    def push(self, buckets: Sequence[Bucket], gather: Gather) -> None:
        """Sync once, wholly; a collective call of all ranks. The prefix cache is flushed with the last bucket."""

    def close(self) -> None:
        """Give back what it keeps between syncs, if anything; a collective call."""
        return


@dataclass(frozen=True, slots=True)
class TensorTransport(Transport):
    """SGLang's own update call, once for each bucket: each rank hands its own copies to the TP rank beside it.

    A list of named tensors, or flattened into one buffer; one for each dtype where this sglang wants that (0.5.1 to 0.5.5).
    """

    engine: VerlEngine
    flattened: bool = False

    def push(self, buckets: Sequence[Bucket], gather: Gather) -> None:
        load_format = "flattened_bucket" if self.flattened else None
        with self.engine.weight_update():
            for bucket, last in _with_last(buckets):
                for tensors, last_part in _with_last(self._calls(gather(bucket))):
                    self.engine.update_weights_from_tensor(tensors, load_format, flush_cache=last and last_part)

    def _calls(self, tensors: Gathered) -> list[Gathered]:
        split = self.flattened and not self.engine.api.bucket_mixes_dtypes
        return split_by_dtype(tensors) if split else [tensors]


@dataclass(frozen=True, slots=True)
class StreamTransport(Transport):
    """Load one bucket while the next is gathered into the other slot; see weight_link for the order of events."""

    engine: VerlEngine
    live: Mapping[str, torch.Tensor]
    link: Callable[[], WeightLink]
    """Opens the link at its first call, and owns it."""

    def push(self, buckets: Sequence[Bucket], gather: Gather) -> None:
        """One engine call for all buckets. gather is not used: they are gathered straight into the slots."""
        link = self.link()
        with self.engine.weight_update():
            link.load(lambda index, slot: gather_into(slot, buckets[index], self.live))


@dataclass(frozen=True, slots=True)
class DistributedTransport(Transport):
    """A broadcast from each engine's head to its TP ranks, which may be on other GPUs and hosts than the trainers."""

    engine: VerlEngine
    group: UpdateGroup

    def push(self, buckets: Sequence[Bucket], gather: Gather) -> None:
        """Raise ConfigError, before anything is sent, for a model that this sglang cannot receive whole."""
        if "name" in self.engine.api.distributed_update_parameters:
            _check_one_tensor_a_call(self.engine.api, [entry.name for bucket in buckets for entry in bucket.entries])
        with self.engine.weight_update():
            for bucket, last in _with_last(buckets):
                self.group.broadcast(gather(bucket), flush_cache=last)

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
        with ExitStack() as cleanup:
            box = [""]
            if dist.get_rank() == 0:
                self.parent.mkdir(parents=True, exist_ok=True)
                box = [tempfile.mkdtemp(prefix="weights-", dir=self.parent)]
                cleanup.callback(shutil.rmtree, box[0], ignore_errors=True)
            dist.broadcast_object_list(box, src=0)
            folder = Path(box[0])
            _together("writing the checkpoint", lambda: self.save(folder))
            _together("loading the checkpoint", lambda: self.engine.update_weights_from_disk(str(folder)))


class TransportChoice(NamedTuple):
    """The transport of a run, and why it is this one."""

    name: TransportName
    reason: str


def default_transport(api: SGLangApi) -> Literal["bucket", "tensor"]:
    """Return how SGLang's own update call takes weights: as a flattened bucket, in older releases as named tensors."""
    return "bucket" if api.flattened_bucket else "tensor"


def choose_transport(config: schema.Config, api: SGLangApi, device: Literal["cpu", "cuda"]) -> TransportChoice:
    """Resolve weights.transport. "auto" is SGLang's own update call: bucket where this sglang has it, else tensor.

    Raise ConfigError for a transport that the devices or this sglang do not allow.
    """
    check_transport(config, device)
    name = config.weights.transport
    if config.parallel.pp > 1 and not api.custom_weight_loader and name != "disk":
        raise ConfigError(
            f"parallel.pp = {config.parallel.pp} cannot work: sglang {api.version} hands the first stage's tensors to every"
            ' stage, and has no custom weight loaders (0.4.8) to mend that; use 1, or weights.transport = "disk".'
        )
    if name == "auto":
        if config.engine.implementation == "sglang":
            return TransportChoice("tensor", "auto: sglang's own VerlEngine takes named tensors only")
        if not config.parallel.colocate:
            return TransportChoice("distributed", "auto: parallel.colocate is false")
        has = "takes" if api.flattened_bucket else "has no"
        return TransportChoice(default_transport(api), f"auto: sglang {api.version} {has} flattened buckets")
    lacks = _what_is_lacking(name, api, device)
    if lacks:
        raise ConfigError(f'weights.transport = "{name}" cannot work: sglang {api.version} {lacks}.')
    return TransportChoice(name, "set in the config")


def split_by_dtype(tensors: Gathered) -> list[Gathered]:
    """Return one list for each dtype, in order. What fuses has one dtype, so it stays together."""
    lists: dict[torch.dtype, Gathered] = {}
    for name, tensor in tensors:
        lists.setdefault(tensor.dtype, []).append((name, tensor))
    return list(lists.values())


def _what_is_lacking(name: str, api: SGLangApi, device: str) -> str | None:
    """Return why this sglang cannot do it and what can, as the end of a sentence; None where it can."""
    if name == "stream" and not api.custom_weight_loader:
        return 'has no custom weight loaders, which came with 0.4.8; use "tensor"'
    if name == "bucket" and not api.flattened_bucket:
        return 'has no flattened buckets, which came with 0.5.1; use "tensor"'
    if name == "distributed" and not api.distributed_update_parameters:
        return 'has no update_weights_from_distributed; use "tensor"'
    if name == "distributed" and sglang_api.update_group_ends_in_barrier(api):
        reason = "gloo refuses" if device == "cpu" else "GPUs the engine does not see"
        return f'ends the start of an update group in a barrier for which it names GPUs ({reason}); use "disk"'
    return None


def _check_one_tensor_a_call(api: SGLangApi, names: Sequence[str]) -> None:
    """Raise ConfigError for halves that fuse: until 0.4.8.post1 a tensor is a call, and SGLang drops a half without the other."""
    halves = next((name for name in names if "kv_a_proj_with_mqa" in name), None)
    if halves and any(name == halves.replace("kv_a_proj_with_mqa", "q_a_proj") for name in names):
        raise ConfigError(
            f'weights.transport = "distributed" cannot work: sglang {api.version} receives one tensor a call, and would'
            f' drop {halves}, which it fuses with q_a_proj of the same call; use "tensor" or "disk".'
        )


def _with_last(items: Sequence[T]) -> Iterator[tuple[T, bool]]:
    """Yield each item, and whether it is the last."""
    return ((item, index + 1 == len(items)) for index, item in enumerate(items))


def _together(what: str, work: Callable[[], None]) -> None:
    """Do the work on this rank; raise on every rank when it failed on one: its own error there, EngineFailed elsewhere."""
    error: Exception | None = None
    try:
        work()
    except Exception as raised:
        error = raised
    failures = all_gather(f"{type(error).__name__}: {error}" if error else None)
    if error:
        raise error
    for rank, failure in enumerate(failures):
        if failure:
            raise EngineFailed(f"{what} failed on rank {rank}: {failure}")
