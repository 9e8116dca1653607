"""What a run would do, said before it starts: every rank's place and every engine's arguments. Serves --dry-run."""

import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import Seat, engine_gpu_of, gpu_of, parse_visible, place
from harness.cluster.ports import EnginePorts, planned_ports

if TYPE_CHECKING:
    from rich.table import Table

_TABLE_WIDTH = 120


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
class Plan:
    """The whole run. Ports are those of a host where nothing else runs; a lease may move up by whole blocks."""

    dims: ParallelDims
    nnodes: int
    nproc_per_node: int
    device: Literal["cpu", "cuda"]
    ranks: tuple[RankPlan, ...]
    engines: tuple[EnginePlan, ...]


def make_plan(
    dims: ParallelDims,
    nnodes: int,
    nproc_per_node: int,
    device: Literal["cpu", "cuda"],
    base_port: int,
    visible_by_host: tuple[str | None, ...] = (),
    engine_gpus: Literal["shared", "apart"] = "shared",
) -> Plan:
    """Plan of `torchrun --nnodes --nproc-per-node` on hosts named host0, host1, ...

    visible_by_host: CUDA_VISIBLE_DEVICES of each host; one entry holds for all, none means unset everywhere.
    Raises the ValueErrors of ParallelDims.validate, parse_visible, place and planned_ports.
    """
    for option, value in (("--nnodes", nnodes), ("--nproc-per-node", nproc_per_node)):
        if value < 1:
            raise ValueError(f"{option} = {value} starts no rank: it must be 1 or more")
    dims.validate(nnodes * nproc_per_node)
    offset = nproc_per_node if engine_gpus == "apart" and device == "cuda" else 0
    seats = _seats(nnodes, nproc_per_node, visible_by_host, offset)
    ranks = []
    for seat in seats:
        at = dims.coordinates(seat.rank)
        gpus = (gpu_of(seat), engine_gpu_of(seat)) if device == "cuda" else (None, None)
        ranks.append(RankPlan(seat.rank, at.dp, at.tp, at.pp, seat.host, seat.local_rank, *gpus))
    engines = _engines(dims, seats, device, base_port)
    return Plan(dims, nnodes, nproc_per_node, device, tuple(ranks), engines)


def plan_as_json(plan: Plan) -> str:
    """The plan's fields as they are, as one JSON object."""
    return json.dumps(asdict(plan), indent=2)


def plan_as_table(plan: Plan) -> str:
    """Two plain tables, ranks and engine nodes, 120 columns wide at most."""
    from rich.console import Console

    text = io.StringIO()
    console = Console(file=text, width=_TABLE_WIDTH, color_system=None, markup=False, highlight=False, _environ={})
    dims = plan.dims
    console.print(
        f"{dims.world_size} ranks on {plan.nnodes} hosts ({plan.device}), mesh dp={dims.dp} tp={dims.tp} pp={dims.pp}, "
        f"rank order {dims.rank_order}",
        soft_wrap=True,
    )
    console.print(_rank_table(plan))
    console.print(_engine_table(plan))
    return "".join(line.rstrip() + "\n" for line in text.getvalue().splitlines())


def _seats(nnodes: int, nproc_per_node: int, visible_by_host: tuple[str | None, ...], engine_offset: int) -> list[Seat]:
    if len(visible_by_host) not in (0, 1, nnodes):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES is given for {len(visible_by_host)} hosts but --nnodes = {nnodes}: give none, one "
            "for all hosts, or one for each"
        )
    values = visible_by_host if len(visible_by_host) == nnodes else (visible_by_host or (None,)) * nnodes
    visible = [parse_visible(value) for value in values]
    return [
        Seat(node * nproc_per_node + local_rank, f"host{node}", local_rank, visible[node], None, engine_offset)
        for node in range(nnodes)
        for local_rank in range(nproc_per_node)
    ]


def _engines(
    dims: ParallelDims, seats: Sequence[Seat], device: Literal["cpu", "cuda"], base_port: int
) -> tuple[EnginePlan, ...]:
    blocks_on_host: Counter[str] = Counter()
    engines = []
    for placement in place(dims, seats, device):
        nodes = []
        for node in placement.nodes:
            ports = planned_ports(base_port, blocks_on_host[node.host])
            blocks_on_host[node.host] += 1
            visible = None if node.visible_devices is None else ",".join(node.visible_devices)
            nodes.append(
                NodePlan(node.node_rank, node.host, node.ranks, node.builder, visible, node.base_gpu_id, ports)
            )
        dist_init_addr = f"{nodes[0].host}:{nodes[0].ports.dist_init_port}"
        engines.append(EnginePlan(placement.dp, dist_init_addr, tuple(nodes)))
    return tuple(engines)


def _rank_table(plan: Plan) -> "Table":
    rows = [(r.rank, r.dp, r.tp, r.pp, r.host, r.local_rank, _gpu_cell(r)) for r in plan.ranks]
    apart = any(r.gpu != r.engine_gpu for r in plan.ranks)
    return _table("Ranks", ("rank", "dp", "tp", "pp", "host", "local_rank", "gpu, engine's" if apart else "gpu"), rows)


def _engine_table(plan: Plan) -> "Table":
    rows = [
        (
            engine.dp,
            node.node_rank,
            node.host,
            _runs(node.ranks),
            node.builder,
            _visible_cell(node.cuda_visible_devices),
            node.base_gpu_id,
            node.ports.port,
            node.ports.nccl_port,
            engine.dist_init_addr,
        )
        for engine in plan.engines
        for node in engine.nodes
    ]
    columns = ("dp", "node", "host", "ranks", "builder", "CUDA_VISIBLE_DEVICES", "base", "port", "nccl", "dist_init")
    return _table("Engine nodes (base: base_gpu_id)", columns, rows)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.ASCII, show_edge=False, pad_edge=False)
    for column in columns:
        # Only the columns that hold lists may wrap; a wrapped number would be misread.
        table.add_column(column, overflow="fold", no_wrap=column not in ("ranks", "CUDA_VISIBLE_DEVICES"))
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    return table


def _gpu_cell(rank: RankPlan) -> str:
    """The rank's GPU, and its engine rank's where that is another."""
    if rank.gpu is None or rank.gpu == rank.engine_gpu:
        return _visible_cell(rank.gpu)
    return _visible_cell(f"{rank.gpu},{rank.engine_gpu}")


def _visible_cell(value: str | None) -> str:
    """Indices stay on one line where they fit; each UUID has its own."""
    if value is None:
        return "-"
    return value.replace(",", ",\n") if "-" in value else value


def _runs(ranks: Sequence[int]) -> str:
    """Ranks in their order, runs of three and more shortened: (0, 1, 2, 3, 8) -> "0-3, 8"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
