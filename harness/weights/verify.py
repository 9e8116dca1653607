"""Did the weights arrive? Asked of what the engine computes, and, where that is off, of what it holds."""

import shutil
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import torch.distributed as dist

from harness.cluster.world import World, all_gather
from harness.rollout import worker
from harness.rollout.verl_engine import VerlEngine
from harness.weights.sync import WeightSync

# What SGLang fuses on arrival: the last part of its own name -> the checkpoint's.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "experts.w13_weight": ("experts.*.gate_proj", "experts.*.up_proj"),
    "experts.w2_weight": ("experts.*.down_proj",),
}


class WeightsDidNotArrive(RuntimeError):
    """The engine computes with other weights than the trainer holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogProbDifference:
    """|engine log-prob - trainer log-prob| over the response tokens of all ranks, in nats."""

    mean: float
    largest: float


def log_prob_difference(engine: torch.Tensor, trainer: torch.Tensor, mask: torch.Tensor) -> LogProbDifference:
    """engine, trainer: float [B, T]; mask: [B, T], 1 at response tokens. A collective call; the same on every rank."""
    gap = torch.where(mask.bool(), (engine.double() - trainer.double()).abs(), 0.0)
    gap = torch.where(gap.isnan(), torch.inf, gap)  # a NaN compares as small as anything
    totals = torch.tensor([gap.sum(), mask.sum()], dtype=torch.float64)
    largest = gap.max().cpu().double()
    dist.all_reduce(totals)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return LogProbDifference(mean=float(totals[0] / totals[1]), largest=float(largest))


def engine_devices(engine: VerlEngine) -> dict[int, str]:
    """World rank -> GPU UUID of the scheduler that exchanges tensors with it, asked of the schedulers themselves.

    A collective call of the engine's ranks. Empty where this sglang has no door into its schedulers (before 0.4.8).
    """
    reports = _inspect(engine)
    return {engine.group.ranks[report.rank]: report.device for report in reports}


def check_same_gpu(world: World, engine: VerlEngine) -> None:
    """Raises ValueError when a trainer rank and its engine rank sit on different GPUs. A collective call."""
    devices: dict[int, str] = {}
    for each in all_gather(engine_devices(engine)):
        devices |= each
    mine = worker.gpu_uuid() if world.device.type == "cuda" else "cpu"
    for rank, trainer in enumerate(all_gather(mine)):
        if devices.get(rank, trainer) != trainer:
            raise ValueError(
                f"rank {rank} trains on GPU {trainer} but its engine rank runs on GPU {devices[rank]};"
                " check CUDA_VISIBLE_DEVICES of that host's ranks."
            )


def suspects(sync: WeightSync, world: World, source: Path) -> list[str]:
    """Engine tensors that are not what the trainer's checkpoint makes of them, each with its checkpoint names.

    The engine reloads the trainer's weights from disk; what that changes had not arrived. A collective call of all
    ranks; needs a folder that all hosts share. Empty where this sglang has no door into its schedulers.
    """
    before = _inspect(sync.engine)
    folder = Path(_agreed(tempfile.mkdtemp(prefix="harness-suspects-") if world.rank == 0 else ""))
    sync.save(folder, source, world.rank)
    dist.barrier()
    sync.engine.update_weights_from_disk(str(folder))
    after = _inspect(sync.engine)
    changed = {
        name
        for old, new in zip(before, after, strict=True)
        for name, digest in old.tensors.items()
        if new.tensors[name] != digest
    }
    names = sorted({name for each in all_gather(changed) for name in each})
    if world.rank == 0:
        shutil.rmtree(folder)
    known = [tensor.name for tensor in sync.layout]
    return [describe(name, known) for name in names]


def describe(engine_name: str, checkpoint_names: Collection[str]) -> str:
    """model.layers.0.self_attn.qkv_proj.weight -> the same, with the checkpoint names it is made of."""
    if engine_name in checkpoint_names:
        return engine_name
    parts = _fused_from(engine_name, checkpoint_names)
    if not parts:  # an architecture with names of its own: what shares the module
        module = engine_name.rsplit(".", 1)[0] + "."
        parts = [name for name in checkpoint_names if name.startswith(module)]
    shown = [*parts[:4], *([f"{len(parts) - 4} more"] if len(parts) > 4 else [])]
    return f"{engine_name} ({', '.join(shown)})" if shown else engine_name


def _fused_from(engine_name: str, checkpoint_names: Collection[str]) -> list[str]:
    for fused, parts in FUSED.items():
        head, found, tail = engine_name.partition(f".{fused}")
        if found and not tail.startswith("_"):
            patterns = [f"{head}.{part}{tail or '.weight'}" for part in parts]
            return [name for pattern in patterns for name in checkpoint_names if fnmatchcase(name, pattern)]
    return []


def _inspect(engine: VerlEngine) -> list[worker.WorkerReport]:
    """This host's schedulers' reports on the rank that built them; elsewhere, and where there is no door, none."""
    if not engine.api.custom_weight_loader:
        return []
    folder = Path(_agreed(tempfile.mkdtemp(prefix="harness-inspect-") if engine.is_head else "", engine))
    # On the engine's device: SGLang's patch for CUDA tensors cannot send others.
    carrier = torch.zeros(1, device=engine.device_type)
    engine.update_weights_from_tensor([(str(folder), carrier)], load_format=worker.INSPECT, flush_cache=False)
    reports = worker.read_reports(folder, len(engine.node.ranks)) if engine.is_builder else []
    dist.barrier(group=engine.group.process_group)
    shutil.rmtree(folder, ignore_errors=True)
    return reports


def _agreed(value: str, engine: VerlEngine | None = None) -> str:
    """The value of the head of the engine's group, or of rank 0."""
    box = [value]
    if engine is None:
        dist.broadcast_object_list(box, src=0)
    else:
        dist.broadcast_object_list(box, engine.group.head, engine.group.process_group)
    return box[0]
