"""Which hosts and GPUs each engine spans, from the locations of all ranks.

Every engine node sees its own ranks' GPUs first, in engine order, with base_gpu_id 0. SGLang then puts the scheduler of
(tp, pp) on the GPU of the trainer rank with the same (tp, pp), which SGLang's own CUDA-IPC handles of weights rely on;
with parallel.colocate = false, on the GPU kept for that rank's engine. Behind them it sees the other GPUs of its
builder: nothing of it runs there, but without them it could open no handle of a trainer there.
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
    ("MIG UUID", re.compile(rf"MIG-({_UUID}|GPU-{_UUID}/[0-9]+/[0-9]+)")),
)


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Where a rank runs, as it reports it.

    host: opaque identity; equal for two ranks exactly if they share a host. visible: CUDA_VISIBLE_DEVICES as
    `parse_visible` gives it, None if unset, () if it hides every GPU. gpu_count: GPUs CUDA shows the rank, if known.
    engine_offset: how far behind its trainer's GPU, among the visible ones, its engine rank's GPU is: 0 where they share
    one, else the number of ranks of its torchrun on the host.
    """

    rank: int
    host: str
    local_rank: int
    visible: tuple[str, ...] | None
    gpu_count: int | None = None
    engine_offset: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} on host {self.host}"


@dataclass(frozen=True, slots=True)
class EngineNode:
    """One host's share of an engine.

    ranks: world ranks in engine order. visible_devices: their engine GPUs' tokens in the same order, None on CPU.
    other_devices: tokens of every other GPU that the builder sees, in its order.
    """

    node_rank: int
    host: str
    ranks: tuple[int, ...]
    visible_devices: tuple[str, ...] | None
    other_devices: tuple[str, ...] = ()
    base_gpu_id: int = 0

    @property
    def builder(self) -> int:
        """The world rank that constructs sglang.Engine on this node."""
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
    """Return a host's name for people, of the identity in a location."""
    return identity.partition("/")[0]


def parse_visible(value: str | None) -> tuple[str, ...] | None:
    """Return the GPU tokens of a CUDA_VISIBLE_DEVICES value: None if unset, () if it hides every GPU.

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
                f"CUDA_VISIBLE_DEVICES = '{value}' has the entry '{entry}': each must be an index, or a full GPU- or "
                "MIG- UUID as nvidia-smi -L prints it"
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
    """Return the GPU (index or UUID) that the rank's trainer uses: its only visible one, else the local_rank-th.

    Raise ValueError where there is no such GPU, or none left for an engine that must have its own.
    """
    is_only = location.visible is not None and len(location.visible) == 1 and location.engine_offset == 0
    return _gpu_at(location, 0 if is_only else location.local_rank)


def engine_gpu_of(location: RankLocation) -> str:
    """Return the GPU (index or UUID) that the rank's engine rank uses; raises as `gpu_of`."""
    offset = location.engine_offset
    return _gpu_at(location, location.local_rank + offset) if offset else gpu_of(location)


def all_gpus_of(location: RankLocation) -> tuple[str, ...]:
    """Return every GPU (index or UUID) that the rank sees, in CUDA's order; none where their number is not known."""
    if location.visible is None:
        return tuple(map(str, range(location.gpu_count or 0)))
    return location.visible[: location.gpu_count]


def place(
    dims: ParallelDims, locations: Sequence[RankLocation], device: Literal["cpu", "cuda"]
) -> tuple[EnginePlacement, ...]:
    """Place each engine, one placement for each dp index; locations may come in any order.

    Raise ValueError for missing or repeated ranks, for two ranks on one GPU, and for an engine whose ranks lie on
    their hosts in a way that SGLang cannot reproduce.
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
    """Return the index-th visible GPU of a location, after checking that it sees as many as it must."""
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
    """Raise ValueError where two ranks of a host, or a rank and another's engine rank, would use one GPU."""
    first_on_host: dict[str, RankLocation] = {}
    users: dict[tuple[str, str], str] = {}
    for location in locations:
        gpu, first = gpu_of(location), first_on_host.setdefault(location.host, location)
        if _kind(gpu) != _kind(gpu_of(first)):
            raise ValueError(
                f"rank {first.rank} uses GPU {gpu_of(first)} and rank {location.rank} uses GPU {gpu} of host "
                f"{location.host}, which may be the same one: set CUDA_VISIBLE_DEVICES in one form, all indices or all "
                "UUIDs, for every rank of a host"
            )
        own = {f"rank {location.rank} (local rank {location.local_rank})": gpu}
        if location.engine_offset:
            own[f"rank {location.rank}'s engine"] = engine_gpu_of(location)
        for user, used in own.items():
            if (other := users.setdefault((location.host, used), user)) != user:
                raise ValueError(
                    f"{other} and {user} both use GPU {used} of host {location.host}: set CUDA_VISIBLE_DEVICES to one list"
                    " of distinct GPUs for the whole host, or give each rank, with parallel.colocate = false each torchrun,"
                    " GPUs of its own"
                )


def _check_hosts(dims: ParallelDims, dp: int, locations: Sequence[RankLocation]) -> None:
    """Raise ValueError unless node n has the n-th equal share of the engine order, which is what SGLang gives it.

    Its rule (tp_per_node = tp // max(nnodes // pp, 1), pp_per_node = max(pp // nnodes, 1)) does that only where one
    of pp and nnodes divides the other; elsewhere it leaves ranks unplaced or places them twice.
    """
    ranks = dims.engine_ranks(dp)
    share = Counter(locations[rank].host for rank in ranks)
    engine = f"engine {dp} (ranks {min(ranks)} to {max(ranks)}, tp = {dims.tp}, pp = {dims.pp})"
    if len(set(share.values())) > 1:
        (most, n_most), (least, n_least) = share.most_common()[0], share.most_common()[-1]
        example = next(rank for rank in ranks if locations[rank].host == least)
        raise ValueError(
            f"{engine} has {n_most} ranks on host {most} but {n_least} on host {least} (rank {example}): SGLang needs "
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
            f" {', '.join(hosts_of(ranks))}: {remedy}"
        )
