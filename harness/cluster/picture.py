"""Which rank is on which GPU of which host, and which engine spans which hosts, as text: of a dry run and of a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from harness.cluster.placement import host_name
from harness.tools.plan.placement_plan import EnginePlan, Plan, RankPlan, plan_of

if TYPE_CHECKING:
    from harness.cluster.mesh import ParallelDims
    from harness.cluster.world import World

WIDTH = 120
MOST_RANKS = 16
"""Of more ranks, what repeats itself is shown once."""


@dataclass(frozen=True, slots=True)
class Block:
    """Hosts and the engines on them, of which none is on another host too."""

    hosts: tuple[str, ...]
    engines: tuple[EnginePlan, ...]
    ranks: tuple[RankPlan, ...]


def picture(plan: Plan, addresses: Mapping[str, str] | None = None) -> list[str]:
    """Lines of 120 columns at most, where names and UUIDs allow. addresses: by host, as the other hosts reach it."""
    dims = plan.dims
    names = host_names(list(dict.fromkeys(rank.host for rank in plan.ranks)))
    known = addresses or {}
    shown = {host: f"{name} ({known[host]})" if host in known else name for host, name in names.items()}
    lines = [
        f"{dims.world_size} ranks on {plan.nnodes} host{_s(plan.nnodes)} ({plan.device}), mesh dp={dims.dp} tp={dims.tp}"
        f" pp={dims.pp}, rank order {dims.rank_order}"
    ]
    blocks = blocks_of(plan)
    fold = dims.world_size > MOST_RANKS
    for _, alike in groupby(blocks, key=_signature if fold else _itself):
        first, *rest = alike
        lines += _block_lines(first, names, shown, plan.device == "cuda")
        if rest:
            lines += _wrapped("  ... ", _rest_items(rest, names), ", ")
    return lines


def picture_of(world: "World", dims: "ParallelDims") -> list[str]:
    """The picture of a run whose ranks have met; the ports that its engines lease are not in it."""
    addresses = {host: known.address for host, known in world.addresses.items()}
    return picture(plan_of(dims, world.locations, world.device_type), addresses)


def blocks_of(plan: Plan) -> list[Block]:
    """The plan in pieces that share no host, by first rank."""
    hosts_of: list[set[str]] = []
    engines_of: list[list[EnginePlan]] = []
    for engine in plan.engines:
        hosts, engines = {node.host for node in engine.nodes}, [engine]
        while hosts_of and any(hosts & earlier for earlier in hosts_of):
            hosts |= hosts_of.pop()
            engines = engines_of.pop() + engines
        hosts_of.append(hosts)
        engines_of.append(engines)
    by_host: dict[str, list[RankPlan]] = {}
    for rank in plan.ranks:
        by_host.setdefault(rank.host, []).append(rank)
    blocks = []
    for hosts, engines in zip(hosts_of, engines_of, strict=True):
        ordered = tuple(host for host in by_host if host in hosts)
        blocks.append(Block(ordered, tuple(engines), tuple(rank for host in ordered for rank in by_host[host])))
    return blocks


def host_names(hosts: Sequence[str]) -> dict[str, str]:
    """Host identity -> its name, numbered where several share one."""
    plain = {host: host_name(host) for host in hosts}
    seen: dict[str, int] = {}
    names = {}
    for host, name in plain.items():
        seen[name] = seen.get(name, 0) + 1
        alone = list(plain.values()).count(name) == 1
        names[host] = name if alone else f"{name}#{seen[name]}"
    return names


def runs(numbers: Sequence[int]) -> str:
    """Numbers in their order, runs of three and more shortened: (0, 1, 2, 3, 8) -> "0-3, 8"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in found)


def _block_lines(block: Block, names: Mapping[str, str], shown: Mapping[str, str], has_gpus: bool) -> Iterator[str]:
    for host, ranks in groupby(block.ranks, key=lambda rank: rank.host):
        yield from _wrapped(f"  {shown[host]}  ", [_rank_text(rank) for rank in ranks], " | ")
    for engine in block.engines:
        for node in engine.nodes:
            items = [f"ranks {runs(node.ranks)}", f"builder rank {node.builder}"]
            if has_gpus and node.cuda_visible_devices is not None:
                first, *more = node.cuda_visible_devices.split(",")
                separate = "-" in first  # UUIDs: so long that each is an item
                items += (
                    [f"CUDA_VISIBLE_DEVICES={first}", *more]
                    if separate
                    else [f"CUDA_VISIBLE_DEVICES={node.cuda_visible_devices}"]
                )
            if node.ports is not None:
                items += [f"port {node.ports.port}", f"nccl {node.ports.nccl_port}"]
                if node.node_rank == 0:
                    items.append(f"rendezvous {node.ports.dist_init_port}")
            yield from _wrapped(f"    engine {engine.dp} node {node.node_rank} on {names[node.host]}: ", items, ", ")


def _rank_text(rank: RankPlan) -> str:
    text = f"rank {rank.rank} dp{rank.dp} tp{rank.tp} pp{rank.pp}"
    if rank.gpu is None or rank.engine_gpu is None:
        return text
    return f"{text} {_gpu(rank.gpu)}" + ("" if rank.gpu == rank.engine_gpu else f", engine's {_gpu(rank.engine_gpu)}")


def _rest_items(rest: Sequence[Block], names: Mapping[str, str]) -> list[str]:
    last = rest[-1]
    hosts, ranks, engines = len(last.hosts), len(last.ranks), len(last.engines)
    first_host, last_host = names[last.hosts[0]], names[last.hosts[-1]]
    return [
        f"{len(rest)} more like this",
        f"each {hosts} host{_s(hosts)}, {ranks} ranks and {engines} engine{_s(engines)} further on",
        f"the last of them {first_host if hosts == 1 else f'{first_host} to {last_host}'}",
        f"ranks {runs([rank.rank for rank in last.ranks])}",
        f"engine{_s(engines)} {runs([engine.dp for engine in last.engines])}",
    ]


def _signature(block: Block) -> object:
    """Equal for blocks that differ in their numbers' start alone."""
    rank_0, dp_0, index = block.ranks[0].rank, block.engines[0].dp, {host: at for at, host in enumerate(block.hosts)}
    ranks = tuple(
        (each.rank - rank_0, each.dp - dp_0, each.tp, each.pp, index[each.host], each.gpu, each.engine_gpu)
        for each in block.ranks
    )
    nodes = tuple(
        (
            engine.dp - dp_0,
            node.node_rank,
            index[node.host],
            tuple(rank - rank_0 for rank in node.ranks),
            node.cuda_visible_devices,
            node.ports,
        )
        for engine in block.engines
        for node in engine.nodes
    )
    return ranks, nodes


_itself: Callable[[Block], object] = id


def _wrapped(head: str, items: Sequence[str], separator: str) -> Iterator[str]:
    """The head and the items, going on in new lines, indented further."""
    line, gap = head, ""
    for position, item in enumerate(items):
        piece = item + (separator.rstrip() if position + 1 < len(items) else "")
        if line.strip() and len(line) + len(gap) + len(piece) > WIDTH:
            yield line.rstrip()
            line, gap = " " * 8, ""
        line += gap + piece
        gap = " "
    yield line


def _gpu(token: str) -> str:
    return token if "-" in token else f"GPU {token}"


def _s(count: int) -> str:
    return "" if count == 1 else "s"
