"""The ranks of one engine: the order in which it numbers them, their hosts and GPUs, and how a failure of one reaches all."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import EngineNode, RankLocation, place
from harness.cluster.world import World, all_gather, own_location
from harness.rollout.engine import EngineFailed, PeerGone, RolloutEngine, in_one_line

T = TypeVar("T")
ALONE_SECONDS = 30.0
"""How long a rank on which the engine did not start waits for the engine's other ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The trainer ranks that share one engine, and their collectives."""

    process_group: dist.ProcessGroup
    ranks: tuple[int, ...]
    """World ranks in engine order: pp major, then tp."""
    rank: int
    """This process's world rank."""
    tp: int
    pp: int

    @property
    def head(self) -> int:
        return self.ranks[0]

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Self:
        """Return the group of a mesh: 1-D over tp, or 2-D over (tp, pp). Raises ValueError for other axes."""
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"device_mesh_cpu must have the axis tp, or the axes tp and pp, got {mesh.mesh_dim_names}."
            )
        table = mesh.mesh.view(mesh.size(0), -1)
        ranks = tuple(table.T.flatten().tolist())
        return cls(
            # A new group even if the mesh spans the whole world: trainer threads use the default group while the engine
            # starts, and two threads must not share a group.
            process_group=dist.new_group(sorted(ranks), backend="gloo", use_local_synchronization=True),
            ranks=ranks,
            rank=dist.get_rank(),
            tp=table.shape[0],
            pp=table.shape[1],
        )

    def barrier(self) -> None:
        dist.barrier(group=self.process_group)

    def broadcast(self, value: T) -> T:
        """Return the head's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, self.head, self.process_group)
        return box[0]

    def all_gather(self, value: T) -> dict[int, T]:
        """Return every rank's value by world rank, lowest first."""
        return dict(zip(sorted(self.ranks), all_gather(value, self.process_group), strict=True))

    def gather(self, value: T) -> list[T]:
        """Return every rank's value in engine order on the head; an empty list elsewhere."""
        received: list[T | None] | None = [None] * len(self.ranks) if self.rank == self.head else None
        dist.gather_object(value, received, self.head, self.process_group)
        if received is None:
            return []
        by_rank = dict(zip(sorted(self.ranks), received, strict=True))
        return [cast(T, by_rank[rank]) for rank in self.ranks]


def gather_failures(
    group: Group, failure: Exception | None, give_up: Callable[[str], None] | None
) -> dict[int, str | None]:
    """Return why the engine did not start, by world rank; None for a rank on which it did.

    A collective call of the group.

    give_up: called on a thread, with a message, if this rank has a failure and others do not come here within
    ALONE_SECONDS. They may wait in SGLang's own start, for minutes, for the part of the engine that has failed here.
    """
    if failure is None or give_up is None:
        return group.all_gather(in_one_line(failure) if failure else None)
    message = in_one_line(failure)
    said = (
        f"EngineFailed: engine start failed on rank {group.rank}: {message}; the engine's other ranks still wait for it"
    )
    alone = threading.Timer(ALONE_SECONDS, give_up, [said])
    alone.daemon = True
    alone.start()
    try:
        return group.all_gather(message)
    finally:
        alone.cancel()


def together(work: Callable[[], T], process_group: dist.ProcessGroup | None = None, what: str = "") -> T:
    """Return what work() returns on this rank.

    If it fails on any rank, raise: its own error there, EngineFailed elsewhere.

    A collective call of the group, and a barrier. PeerGone is the exception: it is raised at once, on its rank alone,
    because the other ranks may wait for the peer for ever. what: the start of EngineFailed's message.
    """
    failure: Exception | None = None
    try:
        value = work()
    except PeerGone:
        raise
    except Exception as error:
        failure = error
    failed = torch.tensor(int(failure is not None))
    dist.all_reduce(failed, dist.ReduceOp.MAX, process_group)
    if not failed:
        return value
    messages = all_gather(failure and in_one_line(failure), process_group)
    if failure is not None:
        raise failure
    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    raise EngineFailed(
        next(f"{what}on rank {rank}: {text}" for rank, text in zip(ranks, messages, strict=True) if text)
    )


def locate_ranks(
    group: Group, device: Literal["cpu", "cuda"], colocate: bool, nnodes: int | None
) -> tuple[dict[int, RankLocation], EngineNode, int]:
    """Return the locations of the group's ranks, this host's share of the engine, and the number of hosts.

    A collective call of the group. Ranks are world ranks. Raises ValueError for a placement that cannot work, or if the
    group is not on `nnodes` hosts (None: on any number).
    """
    locations = group.all_gather(own_location(device == "cpu", colocate))
    # place() wants ranks numbered as in a mesh of this engine alone: tp major, then pp.
    order = [group.ranks[stage * group.tp + index] for index in range(group.tp) for stage in range(group.pp)]
    numbered = [replace(locations[rank], rank=position) for position, rank in enumerate(order)]
    placement = place(ParallelDims(dp=1, tp=group.tp, pp=group.pp), numbered, device)[0]
    if nnodes is not None and nnodes != placement.nnodes:
        raise ValueError(
            f"nnodes = {nnodes}, but the {len(group.ranks)} ranks of this engine are on {placement.nnodes} hosts;"
            f" pass nnodes = {placement.nnodes}, or leave it out."
        )
    nodes = [replace(node, ranks=tuple(order[rank] for rank in node.ranks)) for node in placement.nodes]
    return locations, next(node for node in nodes if group.rank in node.ranks), placement.nnodes


def check_gpus(world: World, engine: RolloutEngine, colocate: bool) -> None:
    """Compare the GPUs of trainers and engine ranks; see check_devices. A collective call of all ranks."""
    if world.device.type == "cuda":
        found = all_gather(engine.ask(current_gpu_uuid) if engine.can_ask else None)
        engines = {rank: gpu for rank, gpu in enumerate(found) if gpu is not None}
        check_devices(all_gather(current_gpu_uuid()), engines, colocate)


def check_devices(trainers: list[str], engines: dict[int, str], colocate: bool) -> None:
    """Raise ValueError if an engine rank is on a wrong GPU.

    trainers: GPU UUID by world rank. engines: GPU UUID of the engine ranks that are known. With colocate a trainer rank
    and its engine rank share a GPU; without, an engine rank shares its GPU with no trainer and no other engine rank.
    """
    users = {} if colocate else {gpu: f"rank {rank} trains there" for rank, gpu in enumerate(trainers)}
    for rank, gpu in sorted(engines.items()):
        misplaced = colocate and gpu != trainers[rank]
        problem = f"its trainer is on GPU {trainers[rank]}" if misplaced else users.get(gpu)
        if problem:
            raise ValueError(
                f"the engine rank of rank {rank} runs on GPU {gpu}, but {problem} (parallel.colocate ="
                f" {str(colocate).lower()}); check CUDA_VISIBLE_DEVICES of that host's ranks."
            )
        users[gpu] = f"so does the engine rank of rank {rank}"


def current_gpu_uuid(*_: Any) -> str:
    """Return the UUID of the current CUDA device, as nvidia-smi names it without its GPU- prefix."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
