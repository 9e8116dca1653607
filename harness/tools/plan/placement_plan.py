"""What a run would do, said before it starts: every rank's place and every engine's arguments. Serves --dry-run."""

import json
from collections import Counter
from collections.abc import Sequence
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
    """One host's share of an engine; ranks in engine order, cuda_visible_devices None on CPU, ports None where they are
    not known."""

    node_rank: int
    host: str
    ranks: tuple[int, ...]
    builder: int
    cuda_visible_devices: str | None
    base_gpu_id: int
    ports: EnginePorts | None


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One engine; dist_init_addr is host:port of its node 0, None without ports."""

    dp: int
    dist_init_addr: str | None
    nodes: tuple[NodePlan, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole run. Ports are those of a host where nothing else runs; a lease may move up by whole blocks.

    nproc_per_node: ranks of the host that has most.
    """

    dims: ParallelDims
    nnodes: int
    nproc_per_node: int
    device: Literal["cpu", "cuda"]
    ranks: tuple[RankPlan, ...]
    engines: tuple[EnginePlan, ...]
    locations: tuple[RankLocation, ...]
    """What the plan was made of; not in its JSON."""
    base_port: int | None
    """As locations."""


def make_plan(
    dims: ParallelDims,
    nnodes: int,
    nproc_per_node: int,
    device: Literal["cpu", "cuda"],
    base_port: int,
    visible_by_host: tuple[str | None, ...] = (),
    colocate: bool = True,
) -> Plan:
    """Plan of `torchrun --nnodes --nproc-per-node` on hosts named host0, host1, ...

    visible_by_host: CUDA_VISIBLE_DEVICES of each host; one entry holds for all, none means unset everywhere.
    Raises the ValueErrors of ParallelDims.validate, parse_visible, place and planned_ports.
    """
    for option, value in (("--nnodes", nnodes), ("--nproc-per-node", nproc_per_node)):
        if value < 1:
            raise ValueError(f"{option} = {value} starts no rank: it must be 1 or more")
    dims.validate(nnodes * nproc_per_node)
    offset = nproc_per_node if not colocate and device == "cuda" else 0
    return plan_of(dims, _seats(nnodes, nproc_per_node, visible_by_host, offset), device, base_port)


def plan_of(
    dims: ParallelDims, locations: Sequence[RankLocation], device: Literal["cpu", "cuda"], base_port: int | None = None
) -> Plan:
    """Plan of these locations, by rank; without base_port nothing is said of ports, which a run leases.

    Raises the ValueErrors of place and planned_ports.
    """
    engines = _engines(dims, locations, device, base_port)
    ranks = []
    for location in locations:
        at = dims.coordinates(location.rank)
        gpus = (gpu_of(location), engine_gpu_of(location)) if device == "cuda" else (None, None)
        ranks.append(RankPlan(location.rank, at.dp, at.tp, at.pp, location.host, location.local_rank, *gpus))
    on_host = Counter(location.host for location in locations)
    nproc_per_node = max(on_host.values())
    return Plan(dims, len(on_host), nproc_per_node, device, tuple(ranks), engines, tuple(locations), base_port)


def plan_as_json(plan: Plan, **more: Any) -> str:
    """Return the plan's fields as they are, and what else is given, as one JSON object."""
    fields = asdict(plan)
    del fields["locations"], fields["base_port"]
    return json.dumps(fields | more, indent=2)


def plan_as_lines(plan: Plan) -> list[str]:
    """Draw the plan as a run draws its ranks."""
    return picture(plan.dims, plan.locations, plan.device, plan.base_port)


def _seats(
    nnodes: int, nproc_per_node: int, visible_by_host: tuple[str | None, ...], engine_offset: int
) -> list[RankLocation]:
    if len(visible_by_host) not in (0, 1, nnodes):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES is given for {len(visible_by_host)} hosts but --nnodes = {nnodes}: give none, one "
            "for all hosts, or one for each"
        )
    values = visible_by_host if len(visible_by_host) == nnodes else (visible_by_host or (None,)) * nnodes
    visible = [parse_visible(value) for value in values]
    return [
        RankLocation(node * nproc_per_node + local_rank, f"host{node}", local_rank, visible[node], None, engine_offset)
        for node in range(nnodes)
        for local_rank in range(nproc_per_node)
    ]


def _engines(
    dims: ParallelDims, locations: Sequence[RankLocation], device: Literal["cpu", "cuda"], base_port: int | None
) -> tuple[EnginePlan, ...]:
    blocks_on_host: Counter[str] = Counter()
    engines = []
    for placement in place(dims, locations, device):
        nodes = []
        for node in placement.nodes:
            ports = None if base_port is None else planned_ports(base_port, blocks_on_host[node.host])
            blocks_on_host[node.host] += 1
            visible = None if node.visible_devices is None else ",".join(node.visible_devices)
            nodes.append(
                NodePlan(node.node_rank, node.host, node.ranks, node.builder, visible, node.base_gpu_id, ports)
            )
        first = nodes[0]
        dist_init_addr = None if first.ports is None else f"{first.host}:{first.ports.dist_init_port}"
        engines.append(EnginePlan(placement.dp, dist_init_addr, tuple(nodes)))
    return tuple(engines)
