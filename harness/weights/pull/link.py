"""The trainer's end of a pull: its shards exported, the plan made with the scheduler beside it, and then pull after pull."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from harness.cluster.world import all_gather
from harness.rollout.verl_engine import VerlEngine
from harness.weights.groups import FusingGroup
from harness.weights.pull.exchange import PullBatch, exchange, plan_exchange, staging_bytes
from harness.weights.pull.shards import RankShards, cuts_of, export_shards, have_moved
from harness.weights.worker import puller
from harness.weights.worker.puller import STAGING, Deliveries, LoadCoverage, Sources


@dataclass(kw_only=True, slots=True)
class PullLink:
    """What the schedulers of one engine know of the trainers' shards. Every method is a collective call of all ranks."""

    engine: VerlEngine
    live: Mapping[str, torch.Tensor]
    groups: tuple[FusingGroup, ...]
    staging_limit: int
    """Bytes of a rank's buffer for what comes from other hosts; one group that is larger alone has its own size."""
    coverage: tuple[LoadCoverage, ...] = ()
    """What the loader of each scheduler makes of the groups, in engine order; empty before `trace`."""
    batches: tuple[PullBatch, ...] = ()
    sent_bytes: int = 0
    """By this rank over the network, in the last pull or comparison."""
    seconds: float = 0.0
    """Of the last pull in this rank's scheduler."""
    _exported: RankShards | None = None
    _staging: torch.Tensor | None = None
    _pulled: int = 0
    _busy: threading.Lock = field(default_factory=threading.Lock)

    def trace(self) -> None:
        """Have every scheduler find out, now, what its loader would fill."""
        with self.engine.weight_update():
            found = self.engine.group.all_gather(self.engine.ask(puller.trace, self.groups))
        self.coverage = tuple(found[rank] for rank in self.engine.group.ranks)
        self._exported, self._pulled = None, 0

    def pull(self) -> None:
        """Have every scheduler copy its shards; no rank may change one before this returns. Raise EngineFailed."""
        with self.alone():
            self.seconds = 0.0
            try:
                for index in self.arrivals():
                    self._pulled += 1
                    self.engine.ask(puller.pull, (self._pulled, index))
                    self.seconds += self.engine.answer_seconds
            except Exception:
                self.coverage = ()  # schedulers may have got differently far: the next pull begins with a trace
                raise

    def release(self) -> None:
        """Have the schedulers close the trainers' memory; the next pull opens it again."""
        if self._exported is not None:
            self.engine.ask(puller.release)
            self._exported = self._staging = None

    def arrivals(self) -> Iterator[int]:
        """Yield the number of each batch once all that it needs is on this host; on to the next when all ranks are done.

        In between, the caller asks the schedulers, which is a barrier of the engine's ranks.
        """
        if not self.coverage:
            self.trace()
        self.sent_bytes = 0
        if self.engine.device_type == "cuda":
            torch.cuda.synchronize()  # the schedulers do not wait for this rank's streams
        if any_of(self._exported is None or have_moved(self.live, self._exported), self.live):
            self._prepare()
        for index, batch in enumerate(self.batches):
            if batch.parcels:
                assert self._staging is not None
                self.sent_bytes += exchange(batch, self.live, self._staging)
                any_of(False, self.live)
            yield index
            if len(self.engine.group.ranks) < dist.get_world_size():
                any_of(False, self.live)

    def _prepare(self) -> None:
        """Export the shards, plan what goes over the network, and have every scheduler make its copies ready."""
        rank, host, gpu = self.engine.group.rank, self.engine.node.host, self.engine.trainer_gpu
        mine = export_shards(self.live, rank, host, gpu)
        visible = self.engine.visible_gpus
        reach = [each for each in all_gather(mine) if each.host == host and (visible is None or each.gpu in visible)]
        needs = self.engine.ask(puller.plan, Sources(cuts=cuts_of(self.live, rank), shards=tuple(reach)))
        reaches, everyone = zip(*all_gather((frozenset(each.rank for each in reach), needs)), strict=True)
        islands = islands_of(reaches)
        self.batches = plan_exchange(dict(enumerate(everyone)), islands, len(self.groups), self.staging_limit)
        staging: tuple[RankShards, ...] = ()
        self._staging = None
        if nbytes := staging_bytes(self.batches):
            self._staging = torch.empty(nbytes, dtype=torch.uint8, device=next(iter(self.live.values())).device)
            exported = all_gather(export_shards({STAGING: self._staging}, rank, host, gpu))
            staging = tuple(each for each in exported if islands[each.rank] == islands[rank])
        self.engine.ask(puller.prepare, Deliveries(batches=self.batches, staging=staging))
        self._exported = mine

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Raise RuntimeError for a call that is begun while another is under way."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("a sync must have ended before the next begins, got two at once")
        try:
            with self.engine.weight_update():
                yield
        finally:
            self._busy.release()


def islands_of(reaches: Sequence[frozenset[int]]) -> dict[int, int]:
    """Return rank -> the lowest rank of its island: ranks whose schedulers can all open each other's trainers' memory.

    reaches: by rank, the trainer ranks whose memory its scheduler can open. Raise ValueError for one that cannot open its own.
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


def any_of(flag: bool, live: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the flag of any rank is true: all ranks have come. A collective call of all ranks."""
    found = torch.tensor([flag], dtype=torch.uint8, device=next(iter(live.values())).device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found.item())
