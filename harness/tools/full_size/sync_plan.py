"""Who sends how many bytes to whom in one weight sync, by each transport, at the model's true size.

What an engine rank reads comes from the traces of its own loader, what a trainer rank holds from FSDP2's row rule, and
what a host must receive from the same regions and needs that a pull plans with. All engines of a run read the same, so
one of them is counted, and one layer for all that are like it.

Links: the same GPU, other GPUs of the host (NVLink), other hosts (network).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from harness.cluster.mesh import ParallelDims
from harness.config.schema import TransportName
from harness.tools.full_size.ranks_at_true_size import NO_LAYER, EngineRank, Layers, kind_of
from harness.trainer.rows import RowShards
from harness.weights.fusing import FusingGroup
from harness.weights.gather import plan_buckets
from harness.weights.pull.exchange import Need
from harness.weights.regions import Cut, cut_by_rows, regions

OWN = -1
"""Stands for the rank itself, as the owner of a tensor that is not sharded."""
PULL_WAITS = 2.5e-3
"""Seconds that the calls and barriers of a pull take, whatever its size: H200 and H100 hosts, sglang 0.5.17."""
TRANSPORTS: tuple[TransportName, ...] = ("pull", "bucket", "tensor", "distributed", "disk")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunShape:
    """Where the ranks of a run are: trainer rank r, and the engine rank beside it, are on host r // nproc_per_node."""

    dims: ParallelDims
    nproc_per_node: int

    @property
    def hosts(self) -> int:
        return -(-self.dims.world_size // self.nproc_per_node)

    def host_of(self, rank: int) -> int:
        return rank // self.nproc_per_node

    def ranks_of(self, host: int) -> range:
        return range(host * self.nproc_per_node, min(self.dims.world_size, (host + 1) * self.nproc_per_node))


@dataclass(frozen=True, kw_only=True)
class SyncPlan:
    """One sync by one transport, in bytes."""

    transport: TransportName
    same_gpu: int
    """Read by the engine rank with most, from its own GPU."""
    nvlink: int
    """Received over NVLink by the rank that receives most."""
    network_in: tuple[int, ...]
    """Received by each host from other hosts."""
    network_out: tuple[int, ...]
    """Sent by each host to other hosts."""
    between_hosts: tuple[tuple[int, ...], ...]
    """[receiver][sender]; empty if a transport goes through files."""
    least_network: int
    """What the host that needs most must receive in any case: elements that its engines need and its trainers do not
    hold."""
    messages: int
    """Calls of the engine, or parcels that hosts send each other."""
    staging: int
    """The largest buffer that a rank needs for it."""
    files: int = 0
    """Read from the shared folder by all engines, once for each engine rank."""

    def seconds(self, rates: "Rates") -> float | None:
        """Return how long the links take at these rates; None if one that is used has no known rate.

        The kernel of a pull reads the rank's own GPU and its peers at the same time; of the other transports each step
        waits for the one before. What a scheduler does beside is not in it: SGLang's load_weights of a bucket takes
        longer than the links.
        """
        network = max((*self.network_in, *self.network_out), default=0)
        parts = (
            (self.same_gpu, rates.same_gpu),
            (self.nvlink, rates.nvlink),
            (network, rates.network),
            (self.files, 0.0),
        )
        if any(nbytes and not rate for nbytes, rate in parts):
            return None
        own, peers, *rest = (nbytes / rate if nbytes else 0.0 for nbytes, rate in parts)
        if self.transport == "pull":
            return max(own, peers) + sum(rest) + PULL_WAITS
        return own + peers + sum(rest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Bytes in a second: read from a rank's own GPU, received over NVLink by a rank, received over the network by a
    host.
    """

    same_gpu: float
    nvlink: float
    network: float
    """0: not known."""


@dataclass(frozen=True, kw_only=True)
class SyncPlanner:
    """Plans syncs of one run."""

    shape: RunShape
    layers: Layers
    """What is sent, by layer."""
    shards: Mapping[str, RowShards]
    """How each tensor of the trainer is divided over all ranks."""
    held: Mapping[str, torch.dtype]
    """The dtype of the trainer's shards, where it is not that in which a tensor is sent."""
    engine: Sequence[EngineRank]
    """The ranks of one engine."""
    bucket_bytes: int

    def plan(self, transport: TransportName) -> SyncPlan:
        if transport == "pull":
            return self._pull()
        if transport == "disk":
            return self._disk()
        return self._gathered(transport)

    def _pull(self) -> SyncPlan:
        hosts = range(self.shape.hosts)
        same_gpu = nvlink = 0
        between = [[0] * len(hosts) for _ in hosts]
        for host in hosts:
            ranks = self.shape.ranks_of(host)
            for owner, nbytes in self._brought[self._kind(host)].items():
                if owner not in (OWN, *ranks):
                    between[host][self.shape.host_of(owner)] += nbytes
            for rank in ranks:
                number = self.shape.dims.engine_rank(rank)
                read, sent = self._read[number], self._sent[number]
                own = read[OWN] + read[rank]
                staged = sum(nbytes for owner, nbytes in sent.items() if owner not in (OWN, *ranks))
                peers = sum(nbytes for owner, nbytes in read.items() if owner in ranks and owner != rank)
                same_gpu = max(same_gpu, own + staged // len(ranks))
                nvlink = max(nvlink, peers + staged * (len(ranks) - 1) // len(ranks))
        incoming = tuple(map(sum, between))
        return SyncPlan(
            transport="pull",
            same_gpu=same_gpu,
            nvlink=nvlink,
            network_in=incoming,
            network_out=tuple(map(sum, zip(*between, strict=True))),
            between_hosts=tuple(map(tuple, between)),
            least_network=max(incoming),
            messages=self._parcels(),
            staging=self._staging() if any(incoming) else 0,
        )

    def _gathered(self, transport: TransportName) -> SyncPlan:
        """Return the plan of an all-gather of every bucket on every rank, and of one update call for each.

        A ring over all ranks brings each byte to a host once, and from there to its other ranks over NVLink.
        """
        hosts = range(self.shape.hosts)
        held = [sum(self._share[rank] for rank in self.shape.ranks_of(host)) for host in hosts]
        between = tuple(tuple(0 if sender == host else held[sender] for sender in hosts) for host in hosts)
        gathered = sum(held)
        nvlink = gathered - min(self._share) if min(self.shape.nproc_per_node, self.shape.dims.world_size) > 1 else 0
        return SyncPlan(
            transport=transport,
            same_gpu=self._sent_bytes,
            # The engine's head sends what it has gathered to every rank of the engine, which has another GPU.
            nvlink=nvlink + (self._sent_bytes if transport == "distributed" else 0),
            network_in=tuple(map(sum, between)),
            network_out=tuple(map(sum, zip(*between, strict=True))),
            between_hosts=between,
            least_network=self._pull().least_network,
            messages=len(self._buckets),
            staging=self.largest_bucket * (1 if transport == "distributed" else 2),
        )

    def _disk(self) -> SyncPlan:
        """Return the plan of gathered buckets that rank 0 writes, and every engine rank reads."""
        gathered = self._gathered("bucket")
        files = self._sent_bytes * self.shape.dims.world_size
        return replace(gathered, transport="disk", same_gpu=0, messages=1, staging=gathered.staging // 2, files=files)

    @property
    def largest_bucket(self) -> int:
        """Bytes of the largest bucket of a gathered sync."""
        return max(self._buckets)

    def bytes_by_pair(self) -> list[dict[int, int]]:
        """Return for each rank of one engine: trainer rank -> bytes that a pull brings from it, as they are sent."""
        return [dict(sorted(each.items())) for each in self._sent]

    def _kind(self, host: int) -> tuple[int, ...]:
        """Return what decides which bytes a host's engines need: which ranks of an engine are on it."""
        return tuple(sorted({self.shape.dims.engine_rank(rank) for rank in self.shape.ranks_of(host)}))

    @cached_property
    def _needs(self) -> list[dict[Need, int]]:
        """For each rank of an engine: what it reads -> how many layers do so."""
        return [dict(self._needs_of(rank, counts)) for rank, counts in zip(self.engine, self._counts, strict=True)]

    def _needs_of(self, rank: EngineRank, counts: Mapping[int, int]) -> Iterator[tuple[Need, int]]:
        for group, copies in zip(rank.groups, rank.coverage.copies, strict=True):
            number, layer = self._numbers[group.views[0].name]
            if not counts.get(layer):
                continue
            for source in (copy.source for copy in copies):
                cuts = self._cuts[self.shards[source.of]]
                for region in regions(source.offset, source.shape, source.stride, source.stride, cuts):
                    yield Need.of(region, source.of, number, source.dtype), counts[layer]

    @cached_property
    def _numbers(self) -> dict[str, tuple[int, int]]:
        """First name of a group -> (its number, its layer)."""
        groups = [(group, layer) for layer, groups in self.layers.items() for group in groups]
        return {group.views[0].name: (number, layer) for number, (group, layer) in enumerate(groups)}

    @cached_property
    def _counts(self) -> list[Counter[int]]:
        """For each rank of an engine: layer that stands for others or itself in its stage -> for how many."""
        found: list[Counter[int]] = []
        tp = self.shape.dims.tp
        for first in range(0, len(self.engine), tp):
            stage = self.engine[first : first + tp]
            common = frozenset.intersection(*(each.layers for each in stage))
            held = frozenset().union(*(each.held_layers for each in stage)) | {NO_LAYER}
            found += [Counter(self._stands_in(layer, common & held) for layer in held)] * len(stage)
        return found

    def _stands_in(self, layer: int, common: Collection[int]) -> int:
        if layer in common or layer not in self._kinds:
            return layer
        return next(each for each in sorted(common) if self._kinds.get(each) == self._kinds[layer])

    @cached_property
    def _kinds(self) -> dict[int, tuple[object, ...]]:
        return {layer: kind_of(groups) for layer, groups in self.layers.items()}

    @cached_property
    def _cuts(self) -> dict[RowShards, tuple[Cut, ...]]:
        return {
            each: cut_by_rows(each, range(each.ranks) if each.ranks > 1 else [OWN])
            for each in set(self.shards.values())
        }

    @cached_property
    def _sent(self) -> list[Counter[int]]:
        """For each rank of an engine: trainer rank -> bytes that it reads, in the dtype in which they are sent."""
        return [_by_owner((need, count * need.nbytes) for need, count in needs.items()) for needs in self._needs]

    @cached_property
    def _read(self) -> list[Counter[int]]:
        """The same in the dtype in which trainers hold them, as a scheduler reads them from its host's GPUs."""
        return [
            _by_owner((need, count * need.elements.numel * self._held_bytes(need)) for need, count in needs.items())
            for needs in self._needs
        ]

    def _held_bytes(self, need: Need) -> int:
        return self.held.get(need.elements.of, need.elements.dtype).itemsize

    @cached_property
    def _needed(self) -> dict[tuple[int, ...], dict[Need, int]]:
        """For each kind of host: what its engines read, each once -> how many layers do so."""
        kinds = {self._kind(host) for host in range(self.shape.hosts)}
        return {kind: {need: count for rank in kind for need, count in self._needs[rank].items()} for kind in kinds}

    @cached_property
    def _brought(self) -> dict[tuple[int, ...], Counter[int]]:
        """For each kind of host: trainer rank -> bytes of what its engines read of it."""
        return {
            kind: _by_owner((need, count * need.nbytes) for need, count in needs.items())
            for kind, needs in self._needed.items()
        }

    def _parcels(self) -> int:
        """Return how many parcels cross the network, over all hosts."""
        by_kind = {kind: _by_owner(needs.items()) for kind, needs in self._needed.items()}
        return sum(
            count
            for host in range(self.shape.hosts)
            for owner, count in by_kind[self._kind(host)].items()
            if owner not in (OWN, *self.shape.ranks_of(host))
        )

    def _staging(self) -> int:
        """Return the most that a rank's staging buffer may need: the limit, or its share of the group that brings
        most.
        """
        receivers = min(self.shape.nproc_per_node, self.shape.dims.world_size)
        largest = 0
        for needs in self._needed.values():
            groups = Counter[int]()
            for need in needs:
                groups[need.group] += need.nbytes
            largest = max(largest, *groups.values())
        total = max(sum(each.values()) for each in self._brought.values())
        return min(max(self.bucket_bytes, largest // receivers), total // receivers)

    @cached_property
    def _groups(self) -> list[FusingGroup]:
        return [group for groups in self.layers.values() for group in groups]

    @cached_property
    def _sent_bytes(self) -> int:
        """Bytes of all checkpoint tensors."""
        return sum(view.nbytes for group in self._groups for view in group.views)

    @cached_property
    def _share(self) -> list[int]:
        """For each trainer rank: bytes of its rows of the sharded tensors, in the dtype in which they are sent."""
        sent = {view.of: view.dtype.itemsize for group in self._groups for view in group.views}
        row_bytes = Counter[RowShards]()
        for name, itemsize in sent.items():
            row_bytes[self.shards[name]] += itemsize * self.shards[name].row_elements
        ranks = range(self.shape.dims.world_size)
        return [
            sum(len(each.rows_of(rank)) * nbytes for each, nbytes in row_bytes.items() if each.ranks > 1)
            for rank in ranks
        ]

    @cached_property
    def _buckets(self) -> list[int]:
        """Bytes of each bucket of a gathered sync."""
        return [each.nbytes for each in plan_buckets(self._groups, self.shards, self.bucket_bytes)]


def _by_owner(pairs: Iterable[tuple[Need, int]]) -> Counter[int]:
    """Return trainer rank -> the sum of the numbers of its needs."""
    found = Counter[int]()
    for need, number in pairs:
        found[need.owner] += number
    return found
