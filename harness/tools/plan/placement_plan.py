"""Where every rank and every engine of a run would be, without starting it."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

from harness.cluster.mesh import ParallelDims
from harness.cluster.picture import picture
from harness.cluster.placement import RankLocation, engine_gpu_of, gpu_of, parse_visible, place
from harness.cluster.ports import EnginePorts, planned_ports


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank; gpu, of its trainer, and engine_gpu, of its engine rank, are an index or a UUID, None on CPU."""

    rank: int
    dp: int
    tp: int
    pp: int
    host: str
    local_rank: int
    gpu: str | None
    engine_gpu: str | None


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One host's share of an engine; ranks in engine order, cuda_visible_devices None on CPU."""

    node_rank: int
    host: str
    ranks: tuple[int, ...]
    builder: int
    cuda_visible_devices: str | None
    base_gpu_id: int
    ports: EnginePorts


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One engine; dist_init_addr is host:port of its node 0."""

    dp: int
    dist_init_addr: str
    nodes: tuple[NodePlan, ...]


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The whole run. Ports are those of a host on which nothing else runs; a lease may move up by whole blocks."""

    dims: ParallelDims
    nnodes: int
    nproc_per_node: int
    device: Literal["cpu", "cuda"]
    ranks: tuple[RankPlan, ...]
    engines: tuple[EnginePlan, ...]
    locations: tuple[RankLocation, ...]
    """What the plan was made of; not in its JSON."""
    base_port: int
    """As locations."""

    def as_json(self, **more: Any) -> str:
        """Return the plan, and what else is given, as one JSON object."""
        fields = asdict(self)
        del fields["locations"], fields["base_port"]
        return json.dumps(fields | more, indent=2)

    def as_lines(self) -> list[str]:
        """Draw the plan as a run draws its ranks."""
        return picture(self.dims, self.locations, self.device, self.base_port)


def plan_placement(
    dims: ParallelDims,
    nnodes: int,
    nproc_per_node: int,
    device: Literal["cpu", "cuda"],
    base_port: int,
    visible_by_host: tuple[str | None, ...] = (),
    colocate: bool = True,
) -> PlacementPlan:
    """Plan `torchrun --nnodes --nproc-per-node` on hosts named host0, host1, ...

    visible_by_host: CUDA_VISIBLE_DEVICES of each host; one entry is for all, none means unset everywhere.
    Raises the ValueErrors of ParallelDims.validate, parse_visible, place and planned_ports.
    """
    for option, value in (("--nnodes", nnodes), ("--nproc-per-node", nproc_per_node)):
        if value < 1:
            raise ValueError(f"{option} must be 1 or more, got {value}")
    dims.validate(nnodes * nproc_per_node)
    if len(visible_by_host) not in (0, 1, nnodes):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES must be given never, once, or once for each of the --nnodes = {nnodes} hosts, got"
            f" {len(visible_by_host)} times"
        )
    values = visible_by_host if len(visible_by_host) == nnodes else (visible_by_host or (None,)) * nnodes
    visible = [parse_visible(value) for value in values]
    offset = nproc_per_node if not colocate and device == "cuda" else 0
    locations = [
        RankLocation(node * nproc_per_node + local_rank, f"host{node}", local_rank, visible[node], None, offset)
        for node in range(nnodes)
        for local_rank in range(nproc_per_node)
    ]
    ranks = []
    for location in locations:
        at = dims.coordinates(location.rank)
        gpus = (gpu_of(location), engine_gpu_of(location)) if device == "cuda" else (None, None)
        ranks.append(RankPlan(location.rank, at.dp, at.tp, at.pp, location.host, location.local_rank, *gpus))
    blocks_on_host: Counter[str] = Counter()
    engines = []
    for engine in place(dims, locations, device):
        nodes = []
        for node in engine.nodes:
            ports = planned_ports(base_port, blocks_on_host[node.host])
            blocks_on_host[node.host] += 1
            gpu_list = None if node.visible_devices is None else ",".join(node.visible_devices)
            nodes.append(
                NodePlan(node.node_rank, node.host, node.ranks, node.builder, gpu_list, node.base_gpu_id, ports)
            )
        first = nodes[0]
        engines.append(EnginePlan(engine.dp, f"{first.host}:{first.ports.dist_init_port}", tuple(nodes)))
    return PlacementPlan(
        dims, nnodes, nproc_per_node, device, tuple(ranks), tuple(engines), tuple(locations), base_port
    )
