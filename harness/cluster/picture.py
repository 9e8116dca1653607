"""A drawing of a world as text: which rank is on which GPU of which host, and which engine spans which hosts."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import EnginePlacement, RankLocation, engine_gpu_of, gpu_of, host_name, place
from harness.cluster.ports import EnginePorts, planned_ports

if TYPE_CHECKING:
    from harness.cluster.world import World

WIDTH = 120
MOST_RANKS = 16
"""Of more ranks, blocks that repeat the one before are drawn once."""


@dataclass(frozen=True, slots=True)
class Block:
    """Hosts, in the order of their first ranks, and the engines on them, none of which is on another host too."""

    hosts: tuple[str, ...]
    engines: tuple[EnginePlacement, ...]


def picture_of(world: "World", dims: ParallelDims) -> list[str]:
    """Draw a run whose ranks have met; without the ports, which its engines lease later."""
    addresses = {host: known.address for host, known in world.addresses.items()}
    return picture(dims, world.locations, world.device_type, addresses=addresses)


def picture(
    dims: ParallelDims,
    locations: Sequence[RankLocation],
    device: Literal["cpu", "cuda"],
    base_port: int | None = None,
    addresses: Mapping[str, str] | None = None,
) -> list[str]:
    """Draw these locations, given by rank, in lines of 120 columns at most, where names and UUIDs allow.

    base_port: show the ports planned from there. addresses: of each host, as the other hosts reach it.
    Raises the ValueErrors of `place` and `planned_ports`.
    """
    engines = place(dims, locations, device)
    drawing = _Drawing(dims, locations, device == "cuda", _planned(engines, base_port))
    names = host_names(list(dict.fromkeys(location.host for location in locations)))
    known = addresses or {}
    heads = {host: f"{name} ({known[host]})" if host in known else name for host, name in names.items()}
    lines = [
        f"{dims.world_size} ranks on {len(names)} host{_s(len(names))} ({device}), mesh dp={dims.dp} tp={dims.tp}"
        f" pp={dims.pp}, rank order {dims.rank_order}"
    ]
    same: Callable[[Block], object] = drawing.signature if dims.world_size > MOST_RANKS else id
    for _, alike in groupby(blocks_of(engines, list(names)), key=same):
        first, *rest = alike
        lines += drawing.lines(first, names, heads)
        if rest:
            lines += _wrapped("  ...", drawing.summary(rest, names), ",")
    return lines


def blocks_of(engines: Sequence[EnginePlacement], hosts: Sequence[str]) -> list[Block]:
    """Cut a placement into blocks that share no host; `hosts` gives the order of the hosts in a block."""
    found: list[tuple[set[str], list[EnginePlacement]]] = []
    for engine in engines:
        own, together = {node.host for node in engine.nodes}, [engine]
        while any(own & earlier for earlier, _ in found):
            earlier, before = found.pop()
            own, together = own | earlier, before + together
        found.append((own, together))
    return [Block(tuple(sorted(own, key=hosts.index)), tuple(together)) for own, together in found]


def host_names(hosts: Sequence[str]) -> dict[str, str]:
    """Map each host identity to its name, numbered where several hosts share one."""
    plain = [host_name(host) for host in hosts]
    return {
        host: name if plain.count(name) == 1 else f"{name}#{plain[: index + 1].count(name)}"
        for index, (host, name) in enumerate(zip(hosts, plain, strict=True))
    }


def runs(numbers: Sequence[int]) -> str:
    """Write numbers in their order, runs of three and more shortened: (0, 1, 2, 3, 8) -> "0-3, 8"."""
    groups = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    found = [[number for _, number in group] for _, group in groups]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in found)


@dataclass(frozen=True, slots=True)
class _Drawing:
    dims: ParallelDims
    locations: Sequence[RankLocation]
    has_gpus: bool
    ports: Mapping[tuple[int, int], EnginePorts]
    """By dp and node_rank; empty where ports are not drawn."""

    def signature(self, block: Block) -> object:
        """Return what is equal for blocks that differ only in where their numbers start: the lines, numbered from 0."""
        names = {host: str(index) for index, host in enumerate(block.hosts)}
        return tuple(self.lines(block, names, names, self._ranks(block)[0], block.engines[0].dp))

    def lines(
        self, block: Block, names: Mapping[str, str], heads: Mapping[str, str], rank_0: int = 0, dp_0: int = 0
    ) -> Iterator[str]:
        for host in block.hosts:
            ranks = [self._rank(location, rank_0, dp_0) for location in self.locations if location.host == host]
            yield from _wrapped(f"  {heads[host]} ", ranks, " |")
        for engine in block.engines:
            for node in engine.nodes:
                numbers = [rank - rank_0 for rank in node.ranks]
                items = [f"ranks {runs(numbers)}", f"builder rank {numbers[0]}"]
                if node.visible_devices:
                    first, *more = node.visible_devices
                    uuids = "-" in first  # so long that each is an item
                    items += [f"CUDA_VISIBLE_DEVICES={first if uuids else ','.join(node.visible_devices)}"]
                    items += more if uuids else []
                if ports := self.ports.get((engine.dp, node.node_rank)):
                    items += [f"port {ports.port}", f"nccl {ports.nccl_port}"]
                    items += [f"rendezvous {ports.dist_init_port}"] if node.node_rank == 0 else []
                head = f"    engine {engine.dp - dp_0} node {node.node_rank} on {names[node.host]}:"
                yield from _wrapped(head, items, ",")

    def summary(self, blocks: Sequence[Block], names: Mapping[str, str]) -> list[str]:
        """Describe blocks that are like the one before them."""
        last = blocks[-1]
        ranks, hosts, engines = self._ranks(last), len(last.hosts), len(last.engines)
        first_host, last_host = names[last.hosts[0]], names[last.hosts[-1]]
        return [
            f"{len(blocks)} more like this",
            f"each {hosts} host{_s(hosts)}, {len(ranks)} ranks and {engines} engine{_s(engines)} further on",
            f"the last of them {first_host if hosts == 1 else f'{first_host} to {last_host}'}",
            f"ranks {runs(ranks)}",
            f"engine{_s(engines)} {runs([engine.dp for engine in last.engines])}",
        ]

    def _ranks(self, block: Block) -> list[int]:
        return sorted(rank for engine in block.engines for node in engine.nodes for rank in node.ranks)

    def _rank(self, location: RankLocation, rank_0: int, dp_0: int) -> str:
        at = self.dims.coordinates(location.rank)
        text = f"rank {location.rank - rank_0} dp{at.dp - dp_0} tp{at.tp} pp{at.pp}"
        if not self.has_gpus:
            return text
        own, engine = (gpu if "-" in gpu else f"GPU {gpu}" for gpu in (gpu_of(location), engine_gpu_of(location)))
        return f"{text} {own}" + ("" if own == engine else f", engine's {engine}")


def _planned(engines: Sequence[EnginePlacement], base_port: int | None) -> dict[tuple[int, int], EnginePorts]:
    """Return the planned ports of every engine node: each host counts its own blocks."""
    if base_port is None:
        return {}
    blocks: dict[str, int] = {}
    found = {}
    for engine in engines:
        for node in engine.nodes:
            found[engine.dp, node.node_rank] = planned_ports(base_port, blocks.get(node.host, 0))
            blocks[node.host] = blocks.get(node.host, 0) + 1
    return found


def _wrapped(head: str, items: Sequence[str], separator: str) -> list[str]:
    """Wrap head and items into lines, never inside an item; further lines are indented."""
    words = [head, *(item + separator for item in items[:-1]), items[-1]]
    text = " ".join(word.replace(" ", "\0") for word in words)
    lines = textwrap.wrap(text, WIDTH, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ").rstrip() for line in lines]


def _s(count: int) -> str:
    return "" if count == 1 else "s"
