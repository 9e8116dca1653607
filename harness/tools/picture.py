"""Which ranks make up which engine, on which host and GPUs: a line of text for each engine and host.

It opens every run, and --dry-run prints it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import RankLocation, engine_gpu_of, gpu_of, host_name, place
from harness.cluster.ports import planned_ports
from harness.observer import Observer, RunContext
from harness.runtime.events import MEET
from harness.runtime.ranks import runs

if TYPE_CHECKING:
    from harness.cluster.network import HostAddress

MOST_LINES = 32
"""Further engines are only counted."""


class PlacementPicture(Observer):
    """Show where the run's own ranks and engines are, once its ranks have met: on the console, and for the report."""

    run: RunContext

    def met(self, run: RunContext) -> None:
        self.run = run

    def phase_ends(self, phase: str, step: int | None) -> None:
        if phase == MEET:
            world, events = self.run.world, self.run.events
            lines = picture(self.run.dims, world.locations, world.device_type, addresses=world.addresses)
            events.fact("placement", picture=lines)
            if events.console:
                events.console.show("\n".join(lines))


def picture(
    dims: ParallelDims,
    locations: Sequence[RankLocation],
    device: Literal["cpu", "cuda"],
    base_port: int | None = None,
    addresses: Mapping[str, "HostAddress"] | None = None,
) -> list[str]:
    """Return the lines for these locations, which are given by rank.

    base_port: show the ports that are planned from there. addresses: of each host, as the other hosts reach it.
    Raise the ValueErrors of `place` and `planned_ports`.
    """
    engines = place(dims, locations, device)
    hosts = {location.host for location in locations}
    lines = [
        f"{dims.world_size} ranks on {len(hosts)} host{'s' if len(hosts) > 1 else ''} ({device}), mesh dp={dims.dp}"
        f" tp={dims.tp} pp={dims.pp}, rank order {dims.rank_order}"
    ]
    leases: Counter[str] = Counter()  # engines of one host take one block of ports after the other
    for engine in engines:
        for node in engine.nodes:
            address = f" ({addresses[node.host].address})" if addresses and node.host in addresses else ""
            line = f"  engine {engine.dp} node {node.node_rank}: ranks {runs(node.ranks)} on {host_name(node.host)}{address}"
            if device == "cuda":
                trainers, engines_own = (
                    ",".join(gpu(locations[rank]) for rank in node.ranks) for gpu in (gpu_of, engine_gpu_of)
                )
                same = trainers == engines_own
                line += f", GPUs {trainers}" if same else f", trainers on GPUs {trainers}, engine on GPUs {engines_own}"
            if base_port is not None:
                ports = planned_ports(base_port, leases[node.host])
                leases[node.host] += 1
                line += f", ports {ports.port}, {ports.nccl_port} (NCCL)"
                line += f", {ports.dist_init_port} (rendezvous)" if node.node_rank == 0 else ""
            lines.append(line)
    more = len(lines) - MOST_LINES
    return [*lines[:MOST_LINES], f"  ... {more} more"] if more > 0 else lines
