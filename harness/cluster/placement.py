"""Which hosts and GPUs each engine spans, from the locations of all ranks.

Each node of an engine sees the GPUs of its own ranks first, in engine order, with base_gpu_id 0. SGLang then puts the
scheduler of (tp, pp) on the GPU of the trainer rank with the same (tp, pp). SGLang's own weight updates, which send
CUDA IPC handles, need that. With parallel.colocate = false the scheduler goes to the GPU that is kept for that rank's
engine.

After its own GPUs, a node sees all others that its builder sees. The engine runs nothing there, but it can open handles
only of GPUs that it sees, and a trainer may use one of these.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from harness.cluster.mesh import ParallelDims

_UUID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_TOKEN_KINDS = (
    ("index", re.compile(r"[0-9]+")),
    ("GPU UUID", re.compile(rf"GPU-{_UUID}")),
)


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Where a rank runs, as the rank itself reports it.

    host: an identity; two ranks share a host exactly if theirs are equal. visible: CUDA_VISIBLE_DEVICES as
    `parse_visible` returns it: None if unset, () if it hides every GPU. gpu_count: the number of GPUs that CUDA shows
    the rank, if known. engine_offset: the index of the engine rank's GPU minus that of its trainer's, among the visible
    ones. It is 0 if they share a GPU, and otherwise the number of ranks that torchrun started on the host.
    """

    rank: int
    host: str
    local_rank: int
    visible: tuple[str, ...] | None
    gpu_count: int | None = None
    engine_offset: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} on host {host_name(self.host)}"


@dataclass(frozen=True, slots=True)
class EngineNode:
    """One host's share of an engine.

    ranks: world ranks in engine order. visible_devices: the GPUs of these engine ranks, in the same order; None on CPU.
    other_devices: all other GPUs that the builder sees, in its order.
    """

    node_rank: int
    host: str
    ranks: tuple[int, ...]
    visible_devices: tuple[str, ...] | None
    other_devices: tuple[str, ...] = ()
    base_gpu_id: int = 0

    @property
    def builder(self) -> int:
        """The world rank that builds sglang.Engine on this node."""
        return self.ranks[0]

    @property
    def cuda_visible_devices(self) -> str | None:
        """CUDA_VISIBLE_DEVICES of the engine's processes here: its own GPUs, then the others; None on CPU."""
        return None if self.visible_devices is None else ",".join((*self.visible_devices, *self.other_devices))


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """One engine: its dp index and its nodes, by node_rank."""

    dp: int
    nodes: tuple[EngineNode, ...]

    @property
    def nnodes(self) -> int:
        return len(self.nodes)


def host_name(identity: str) -> str:
    """Return the readable part of a host's identity."""
    return identity.partition("/")[0]


def parse_visible(value: str | None) -> tuple[str, ...] | None:
    """Return the entries of a CUDA_VISIBLE_DEVICES value: None if unset, () if it hides every GPU.

    As in CUDA, the list ends at -1. Raise ValueError for an entry that is neither an index nor a full UUID as
    nvidia-smi -L prints it (an abbreviation could name a GPU twice), for a mix of kinds, and for a repeated GPU.
    """
    if value is None:
        return None
    tokens: list[str] = []
    for entry in map(str.strip, value.split(",") if value.strip() else []):
        if entry == "-1":
            break
        kind = _kind(entry)
        if kind is None:
            raise ValueError(
                f"CUDA_VISIBLE_DEVICES = '{value}' has the entry '{entry}': each must be an index, or a full UUID "
                "as nvidia-smi -L prints it (GPU-...)"
            )
        token = str(int(entry)) if kind == "index" else entry
        if token in tokens:
            raise ValueError(f"CUDA_VISIBLE_DEVICES = '{value}' lists GPU {token} twice: list each GPU once")
        if tokens and _kind(tokens[0]) != kind:
            raise ValueError(
                f"CUDA_VISIBLE_DEVICES = '{value}' mixes {_kind(tokens[0])} and {kind} entries: write all in one form"
            )
        tokens.append(token)
    return tuple(tokens)


def gpu_of(location: RankLocation) -> str:
    """Return the GPU (index or UUID) of the rank's trainer: the only visible one, or the one with index local_rank.

    Raise ValueError if the rank does not see that GPU, or if its engine needs another GPU and none is left.
    """
    is_only = location.visible is not None and len(location.visible) == 1 and location.engine_offset == 0
    return _gpu_at(location, 0 if is_only else location.local_rank)


def engine_gpu_of(location: RankLocation) -> str:
    """Return the GPU (index or UUID) that the rank's engine rank uses. Raises as `gpu_of` does."""
    offset = location.engine_offset
    return _gpu_at(location, location.local_rank + offset) if offset else gpu_of(location)


def all_gpus_of(location: RankLocation) -> tuple[str, ...]:
    """Return every GPU (index or UUID) that the rank sees, in CUDA's order; () if their number is not known."""
    if location.visible is None:
        return tuple(map(str, range(location.gpu_count or 0)))
    return location.visible[: location.gpu_count]


def place(
    dims: ParallelDims, locations: Sequence[RankLocation], device: Literal["cpu", "cuda"]
) -> tuple[EnginePlacement, ...]:
    """Return one placement for each dp index. The locations may come in any order.

    Raise ValueError for missing or repeated ranks, for two ranks on one GPU, and for an engine whose ranks are
    spread over hosts in a way that SGLang cannot reproduce.
    """
    ordered = _by_rank(dims, locations)
    if device == "cuda":
        _check_gpus(ordered)
    engines = []
    for dp in range(dims.dp):
        _check_hosts(dims, dp, ordered)
        nodes = []
        for node_rank, (host, group) in enumerate(groupby(dims.engine_ranks(dp), key=lambda rank: ordered[rank].host)):
            ranks = tuple(group)
            own = tuple(engine_gpu_of(ordered[rank]) for rank in ranks) if device == "cuda" else None
            others = tuple(gpu for gpu in all_gpus_of(ordered[ranks[0]]) if gpu not in own) if own else ()
            nodes.append(EngineNode(node_rank, host, ranks, own, others))
        engines.append(EnginePlacement(dp, tuple(nodes)))
    return tuple(engines)


def _kind(token: str) -> str | None:
    return next((kind for kind, pattern in _TOKEN_KINDS if pattern.fullmatch(token)), None)


def _by_rank(dims: ParallelDims, locations: Sequence[RankLocation]) -> list[RankLocation]:
    ordered = sorted(locations, key=lambda location: location.rank)
    dims.validate(len(ordered))
    if [location.rank for location in ordered] != list(range(len(ordered))):
        raise ValueError(f"ranks must be 0 to {len(ordered) - 1}, each once, got {', '.join(map(str, ordered))}")
    return ordered


def _gpu_at(location: RankLocation, index: int) -> str:
    """Return the visible GPU with this index. Raise ValueError if the location sees too few."""
    if location.visible == ():
        raise ValueError(
            f"{location} has CUDA_VISIBLE_DEVICES='', which hides every GPU: unset it, or list the GPUs of this host's ranks"
        )
    shown = "unset" if location.visible is None else f"'{','.join(location.visible)}'"
    counts = [location.gpu_count, None if location.visible is None else len(location.visible)]
    count = min((known for known in counts if known is not None), default=None)
    sees = f"sees {count} GPUs (CUDA_VISIBLE_DEVICES {shown})"
    needed = 2 * location.engine_offset
    if count is not None and count < needed:
        raise ValueError(
            f"{location} {sees}, but parallel.colocate = false needs {needed}, two for each of its torchrun's"
            f" {location.engine_offset} ranks: make all of them visible to every rank, without a wrapper that gives each"
            " rank its own, or set it to true"
        )
    if count is not None and index >= count:
        raise ValueError(
            f"{location} has local rank {location.local_rank} but {sees}: make one GPU visible for each rank of the host,"
            " or start fewer ranks with --nproc-per-node"
        )
    return str(index) if location.visible is None else location.visible[index]


def _check_gpus(locations: Sequence[RankLocation]) -> None:
    """Raise ValueError if two ranks (trainer or engine ranks) would use the same GPU of a host."""
    first_on_host: dict[str, RankLocation] = {}
    users: dict[tuple[str, str], str] = {}
    for location in locations:
        gpu, first = gpu_of(location), first_on_host.setdefault(location.host, location)
        if _kind(gpu) != _kind(gpu_of(first)):
            raise ValueError(
                f"rank {first.rank} uses GPU {gpu_of(first)} and rank {location.rank} uses GPU {gpu} of host "
                f"{host_name(location.host)}, which may be the same one: set CUDA_VISIBLE_DEVICES in one form, all indices or all "
                "UUIDs, for every rank of a host"
            )
        own = {f"rank {location.rank} (local rank {location.local_rank})": gpu}
        if location.engine_offset:
            own[f"rank {location.rank}'s engine"] = engine_gpu_of(location)
        for user, used in own.items():
            if (other := users.setdefault((location.host, used), user)) != user:
                raise ValueError(
                    f"{other} and {user} both use GPU {used} of host {host_name(location.host)}: set CUDA_VISIBLE_DEVICES to one list"
                    " of distinct GPUs for the whole host, or give each rank, with parallel.colocate = false each torchrun,"
                    " different GPUs"
                )


def _check_hosts(dims: ParallelDims, dp: int, locations: Sequence[RankLocation]) -> None:
    """Raise ValueError unless the hosts split the engine's ranks, in engine order, into equal contiguous shares.

    SGLang assigns ranks that way: tp_per_node = tp // max(nnodes // pp, 1), pp_per_node = max(pp // nnodes, 1). If
    neither of pp and nnodes divides the other, it leaves ranks without a place or places them twice.
    """
    ranks = dims.engine_ranks(dp)
    share = Counter(locations[rank].host for rank in ranks)
    engine = f"engine {dp} (ranks {min(ranks)} to {max(ranks)}, tp = {dims.tp}, pp = {dims.pp})"
    if len(set(share.values())) > 1:
        (most, n_most), (least, n_least) = share.most_common()[0], share.most_common()[-1]
        example = next(rank for rank in ranks if locations[rank].host == least)
        raise ValueError(
            f"{engine} has {n_most} ranks on host {host_name(most)} but {n_least} on host {host_name(least)} (rank {example}): SGLang needs "
            "equal shares, so choose parallel.tp * parallel.pp to divide --nproc-per-node or to be a multiple of it"
        )
    nnodes = len(share)
    if dims.pp % nnodes != 0 and nnodes % dims.pp != 0:
        raise ValueError(
            f"{engine} spans {nnodes} hosts, from {locations[ranks[0]]}, and SGLang cannot split {dims.pp} stages over "
            f"{nnodes} hosts: choose parallel.pp so that one of the two numbers divides the other"
        )

    def hosts_of(order: Sequence[int]) -> list[str]:
        return [host for host, _ in groupby(order, key=lambda rank: locations[rank].host)]

    if len(hosts_of(ranks)) > nnodes:
        remedy = "its hosts are not adjacent: number the ranks host by host, as torchrun does"
        if len(hosts_of(sorted(ranks))) == nnodes:
            remedy = 'set parallel.rank_order = "dp,pp,tp"'
        raise ValueError(
            f"{engine} is not contiguous by host in SGLang's order (pp, then tp), which is on hosts"
            f" {', '.join(map(host_name, hosts_of(ranks)))}: {remedy}"
        )
