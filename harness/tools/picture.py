"""A drawing of a world as text: which rank is on which GPU of which host, and which engine spans which hosts.

It opens every run, and --dry-run prints it.
"""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import EngineNode, RankLocation, engine_gpu_of, gpu_of, host_name, place
from harness.cluster.ports import planned_ports
from harness.runtime.observer import Observer, RunContext
from harness.runtime.phases import MEET

if TYPE_CHECKING:
    from harness.cluster.network import HostAddress

WIDTH = 120
MOST_LINES, LAST_LINES = 32, 8
"""Of more lines, those between the first ones and the last ones are left out."""


class PlacementPicture(Observer):
    """Draw the run's own world once its ranks have met: on the console, and for the report."""

    run: RunContext

    def met(self, run: RunContext) -> None:
        self.run = run

    def phase_ends(self, phase: str, step: int | None) -> None:
        if phase != MEET:
            return
        world, events, dims = self.run.world, self.run.events, self.run.dims
        drawn = picture(dims, world.locations, world.device_type, addresses=world.addresses)
        engines = place(dims, world.locations, world.device_type)
        events.fact("placement", engines=[repr(each) for each in engines], picture=drawn)
        if events.console:
            events.console.show("\n".join(drawn))


def picture(
    dims: ParallelDims,
    locations: Sequence[RankLocation],
    device: Literal["cpu", "cuda"],
    base_port: int | None = None,
    addresses: Mapping[str, "HostAddress"] | None = None,
) -> list[str]:
    """Draw these locations, given by rank, in lines of 120 columns at most, where names and UUIDs allow.

    base_port: show the ports planned from there. addresses: of each host, as the other hosts reach it.
    Raises the ValueErrors of `place` and `planned_ports`.
    """
    engines = place(dims, locations, device)
    names = host_names(list(dict.fromkeys(location.host for location in locations)))
    lines = [
        f"{dims.world_size} ranks on {len(names)} host{'s' if len(names) > 1 else ''} ({device}), mesh dp={dims.dp}"
        f" tp={dims.tp} pp={dims.pp}, rank order {dims.rank_order}"
    ]
    for host, name in names.items():
        known = f" ({addresses[host].address})" if addresses and host in addresses else ""
        ranks = [_rank(dims, location, device) for location in locations if location.host == host]
        lines += _wrapped(f"  {name}{known} ", ranks, " |")
    blocks: Counter[str] = Counter()  # each host counts its own blocks of ports
    for engine in engines:
        for node in engine.nodes:
            items = [f"ranks {runs(node.ranks)}", f"builder rank {node.builder}"]
            items += _devices(node)
            if base_port is not None:
                ports = planned_ports(base_port, blocks[node.host])
                blocks[node.host] += 1
                items += [f"port {ports.port}", f"nccl {ports.nccl_port}"]
                items += [f"rendezvous {ports.dist_init_port}"] if node.node_rank == 0 else []
            lines += _wrapped(f"    engine {engine.dp} node {node.node_rank} on {names[node.host]}:", items, ",")
    if len(lines) <= MOST_LINES:
        return lines
    return [*lines[: MOST_LINES - LAST_LINES], f"  ... {len(lines) - MOST_LINES} more lines", *lines[-LAST_LINES:]]


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


def _rank(dims: ParallelDims, location: RankLocation, device: str) -> str:
    at = dims.coordinates(location.rank)
    text = f"rank {location.rank} dp{at.dp} tp{at.tp} pp{at.pp}"
    if device == "cpu":
        return text
    own, engine = (gpu if "-" in gpu else f"GPU {gpu}" for gpu in (gpu_of(location), engine_gpu_of(location)))
    return f"{text} {own}" + ("" if own == engine else f", engine's {engine}")


def _devices(node: EngineNode) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES of an engine's node as items: its own GPUs, and in brackets those behind them."""
    own, others = node.visible_devices, node.other_devices
    if not own:
        return []
    uuids = "-" in own[0]  # so long that each is an item, and that others are only counted
    items = list(own) if uuids else [",".join(own)]
    items[0] = f"CUDA_VISIBLE_DEVICES={items[0]}"
    if others:
        items[-1] += f" (then {f'{len(others)} more' if uuids else runs([int(gpu) for gpu in others])})"
    return items


def _wrapped(head: str, items: Sequence[str], separator: str) -> list[str]:
    """Wrap head and items into lines, never inside an item; further lines are indented."""
    words = [head, *(item + separator for item in items[:-1]), items[-1]]
    text = " ".join(word.replace(" ", "\0") for word in words)
    lines = textwrap.wrap(text, WIDTH, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ").rstrip() for line in lines]
