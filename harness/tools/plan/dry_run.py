"""What launch/ppo.py --dry-run and --check print: where every rank and engine of a run would be, and whether it fits.

Needs neither torch, transformers nor SGLang.
"""

import json
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Literal

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import RankLocation, engine_gpu_of, gpu_of, parse_visible, place
from harness.cluster.ports import EnginePorts, planned_ports
from harness.config.rules import warnings
from harness.runtime.units import GIB
from harness.tools.command_line import Command
from harness.tools.picture import picture
from harness.tools.plan.memory_estimate import MemoryEstimate
from harness.tools.plan.model_shapes import UnknownShape

DEFAULT_GPU_GIB = 80.0


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
    """One host's share of an engine; ranks in engine order.

    cuda_visible_devices: the GPUs of these ranks first, then the host's others that the builder sees; None on CPU.
    """

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
    locations: tuple[RankLocation, ...]  # what the plan was made of; not in its JSON


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

    visible_by_host: CUDA_VISIBLE_DEVICES of each host; one entry is for all, none means unset everywhere. Where it is
    unset, the host is taken to have as many GPUs as its ranks need.
    Raises the ValueErrors of ParallelDims.validate, parse_visible, place and planned_ports.
    """
    dims.validate(nnodes * nproc_per_node)
    values = visible_by_host if len(visible_by_host) == nnodes else (visible_by_host or (None,)) * nnodes
    offset = nproc_per_node if not colocate and device == "cuda" else 0
    needed = nproc_per_node + offset
    locations = [
        RankLocation(
            rank=node * nproc_per_node + local_rank,
            host=f"host{node}",
            local_rank=local_rank,
            visible=parse_visible(value),
            gpu_count=needed if value is None else None,
            engine_offset=offset,
        )
        for node, value in enumerate(values)
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
            shown = node.cuda_visible_devices
            nodes.append(NodePlan(node.node_rank, node.host, node.ranks, node.builder, shown, node.base_gpu_id, ports))
        address = f"{nodes[0].host}:{nodes[0].ports.dist_init_port}"
        engines.append(EnginePlan(engine.dp, address, tuple(nodes)))
    return PlacementPlan(dims, nnodes, nproc_per_node, device, tuple(ranks), tuple(engines), tuple(locations))


def show(command: Command) -> int:
    """Print the plan, or with --check whether the config can work; return the exit code.

    Raises ValueError for what cannot work.
    """
    config, options = command.config, command.options
    is_cpu = config.engine.device == "cpu"
    for sentence in warnings(config):
        print(f"warning: {sentence}", file=sys.stderr)
    # The shell's list is of this host: it is planned with where the plan is of one host, and no other list is given.
    here = os.environ.get("CUDA_VISIBLE_DEVICES")
    from_shell = (here,) if here and not (options.cuda_visible_devices or options.nnodes > 1 or is_cpu) else ()
    plan = plan_placement(
        ParallelDims.of(config.parallel),
        nnodes=options.nnodes,
        nproc_per_node=options.nproc_per_node,
        device="cpu" if is_cpu else "cuda",  # "auto" counts as CUDA, whose placement is the harder one
        base_port=config.engine.base_port,
        visible_by_host=tuple(options.cuda_visible_devices) or from_shell,
        colocate=config.parallel.colocate,
    )
    dims = plan.dims
    if not options.dry_run:
        print(f"ok: {len(plan.ranks)} ranks, dp {dims.dp} tp {dims.tp} pp {dims.pp}, model {config.model.name}")
        return 0
    unknown, memory = "Memory is not estimated for the CPU.", None
    if not is_cpu:
        try:
            memory = MemoryEstimate(config, int((options.gpu_memory_gib or DEFAULT_GPU_GIB) * GIB))
        except UnknownShape as problem:
            unknown = f"Memory is not estimated: {problem}."
    if options.json:
        fields = asdict(plan) | {"memory": memory.as_dict() if memory else {"unknown": unknown}}
        del fields["locations"]
        print(json.dumps(fields, indent=2))
    else:
        print("\n".join(picture(dims, plan.locations, plan.device, config.engine.base_port)))
        if config.engine.device == "auto":
            print('engine.device = "auto" is planned as CUDA; --engine.device cpu shows the plan for CPU')
        for visible in from_shell:
            print(f"CUDA_VISIBLE_DEVICES = {visible} is this shell's; --cuda-visible-devices gives another")
        default = "an A100 or H100; another with --gpu-memory-gib, 140 for an H200"
        source = "--gpu-memory-gib" if options.gpu_memory_gib else default
        print("", *(memory.as_lines(source) if memory else [unknown]), sep="\n")
    return 0 if memory is None or memory.fits else 1
