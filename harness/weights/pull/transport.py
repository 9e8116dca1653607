"""PullTransport, the trainer's end of a pull: exports the shards, plans with the scheduler next to it, then pulls."""

import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from harness.cluster.world import all_gather
from harness.rollout.engine import PullableEngine
from harness.weights.fusing import FusingGroup
from harness.weights.pull import puller
from harness.weights.pull.exchange import PullBatch, exchange, plan_exchange, staging_bytes
from harness.weights.pull.puller import STAGING, Deliveries, Sources
from harness.weights.pull.shards import RankShards, cuts_of, export_shards, have_moved
from harness.weights.trainer_weights import TrainerWeights


class PullTransport:
    """Each scheduler copies its own shards out of the trainers' memory: nothing is gathered. See README.md."""

    def __init__(self, engine: PullableEngine, *, offloaded: bool = False) -> None:
        self.engine = engine
        self.offloaded = offloaded
        """The trainers' memory is given up between syncs: no scheduler may keep it open."""
        self.batches: tuple[PullBatch, ...] = ()
        self.sent_bytes = 0
        """Sent by this rank over the network in the last pull."""
        self._groups: tuple[FusingGroup, ...] | None = None
        """The groups that the schedulers have planned for."""
        self._exported: RankShards | None = None
        """This rank's shards, as the schedulers have opened them; None if the next pull must plan."""
        self._staging: torch.Tensor | None = None
        self._pulled = 0
        """Batches pulled since the plan was made: each has a number, so that none is pulled twice or left out."""
        self._busy = threading.Lock()
        self._name = uuid.uuid4().hex
        """Tells this rank's scheduler which transport asks."""

    def send(self, weights: TrainerWeights) -> None:
        """Have every scheduler copy its shards; no rank may change one before this returns. Raise EngineFailed."""
        with self._alone():
            try:
                self._pull(weights)
            except Exception:
                # Schedulers may differ in how far they got: the next pull plans anew.
                self._groups = self._exported = None
                raise
        self.engine.flush_cache()
        if self.offloaded:
            self._release()

    def _pull(self, weights: TrainerWeights) -> None:
        tensors = weights.tensors
        device = next(iter(tensors.values())).device
        self.sent_bytes = 0
        moved = self._exported is None or have_moved(tensors, self._exported)
        if device.type == "cuda":
            torch.cuda.synchronize()  # the schedulers do not wait for this rank's streams
        if any_of(moved, device):
            self._plan(weights)
        several_engines = len(self.engine.group.ranks) < dist.get_world_size()
        for index, batch in enumerate(self.batches):
            if batch.parcels:
                assert self._staging is not None
                self.sent_bytes += exchange(batch, tensors, self._staging)
                wait_for_all_ranks(device)  # a scheduler also reads what another rank of its host has received
            self._pulled += 1
            self.engine.ask(puller.pull, (self._name, self._pulled, index))
            if several_engines:
                # ask() waits for one engine's ranks. The others' schedulers read the same shards and staging buffers,
                # which may change from here on.
                wait_for_all_ranks(device)

    def bytes_read(self) -> dict[int, int]:
        """Return trainer rank -> how many bytes of its memory the scheduler next to this rank reads in one pull.

        What other hosts send over the network is not counted. Call it after a sync, on all ranks (a collective call).
        """
        return self.engine.ask(puller.bytes_read, self._name)

    def close(self) -> None:
        """Have the schedulers close the trainers' memory; the next pull plans anew."""
        self._release()
        self._groups = None

    def _release(self) -> None:
        if self._exported is not None:
            self.engine.ask(puller.release, self._name)
            self._exported = self._staging = None

    def _plan(self, weights: TrainerWeights) -> None:
        """Export the shards, plan what goes over the network, and have every scheduler prepare its copies."""
        rank, host, gpu = self.engine.group.rank, self.engine.host, self.engine.trainer_gpu
        tensors, visible = weights.tensors, self.engine.visible_gpus
        export = partial(export_shards, rank=rank, host=host, gpu=gpu, ranks_here=all_gather(host).count(host))
        mine = export(tensors)
        openable = tuple(
            each for each in all_gather(mine) if each.host == host and (visible is None or each.gpu in visible)
        )
        groups = None if weights.groups is self._groups else weights.groups
        sources = Sources(groups=groups, cuts=cuts_of(tensors, rank), shards=openable, transport=self._name)
        needs = self.engine.ask(puller.plan, sources)
        reaches, everyone = zip(*all_gather((frozenset(each.rank for each in openable), needs)), strict=True)
        islands = islands_of(reaches)
        limit = weights.bucket_bytes
        self.batches = plan_exchange(dict(enumerate(everyone)), islands, len(weights.groups), limit)
        self._staging, staging = None, ()
        if nbytes := staging_bytes(self.batches):
            self._staging = torch.empty(nbytes, dtype=torch.uint8, device=next(iter(tensors.values())).device)
            exported = all_gather(export({STAGING: self._staging}))
            staging = tuple(each for each in exported if islands[each.rank] == islands[rank])
        self.engine.ask(puller.prepare, (self._name, Deliveries(batches=self.batches, staging=staging)))
        self._groups, self._exported, self._pulled = weights.groups, mine, 0

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Raise RuntimeError for a sync that begins while another one runs."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("a sync must have ended before the next begins, got two at once")
        try:
            with self.engine.weight_update():
                yield
        finally:
            self._busy.release()


def islands_of(reaches: Sequence[frozenset[int]]) -> dict[int, int]:
    """Return rank -> the lowest rank of its island: ranks whose schedulers can all open each other's trainers' memory.

    reaches: by rank, the trainer ranks whose memory its scheduler can open. Raise ValueError for a rank that cannot
    open its own trainer's memory.
    """
    for rank, reach in enumerate(reaches):
        if rank not in reach:
            raise ValueError(
                f"the engine of rank {rank} must see the GPU of rank {rank}'s trainer to pull its shards; list both in"
                ' CUDA_VISIBLE_DEVICES, or use weights.transport "distributed".'
            )
    return {
        rank: min(reach) if all(reaches[other] == reach for other in reach) else rank
        for rank, reach in enumerate(reaches)
    }


def any_of(flag: bool, device: torch.device) -> bool:
    """Return whether the flag of any rank is true. A collective call of all ranks."""
    found = torch.tensor([flag], dtype=torch.uint8, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found.item())


def wait_for_all_ranks(device: torch.device) -> None:
    """Return when every rank is here and its GPU has done what it was given: dist.barrier() waits for no stream."""
    any_of(False, device)
