"""What runs inside SGLang's schedulers: named as a custom weight loader, SGLang calls it in every rank of the engine.

It is the one door into the schedulers that needs no HTTP (sglang 0.4.8 and newer). A loader gets the model and
(name, tensor) pairs and returns nothing, so the name carries the folder that the answer is written to.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

INSPECT = "harness.rollout.worker.inspect_model"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReport:
    """What one scheduler holds."""

    rank: int
    """Engine rank: pp major, then tp."""
    device: str
    """UUID of its GPU, or "cpu"."""
    tensors: dict[str, str]
    """sha256 of each parameter's and buffer's bytes, by the engine's own (fused, sharded) names."""


def inspect_model(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Write this scheduler's WorkerReport into the folder that the first name gives. Changes no weight."""
    folder = Path(named_tensors[0][0])
    rank = dist.get_rank()
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    report = WorkerReport(
        rank=rank,
        device=gpu_uuid() if next(model.parameters()).is_cuda else "cpu",
        tensors={name: tensor_digest(tensor) for name, tensor in tensors.items()},
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{rank}.json").write_text(json.dumps(asdict(report)), encoding="utf-8")


def read_reports(folder: Path) -> list[WorkerReport]:
    """The reports that this host's schedulers wrote, by engine rank."""
    reports = [WorkerReport(**json.loads(file.read_text(encoding="utf-8"))) for file in folder.glob("rank*.json")]
    return sorted(reports, key=lambda report: report.rank)


def tensor_digest(tensor: torch.Tensor) -> str:
    """sha256 of a tensor's bytes in row-major order, whatever its strides."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def gpu_uuid() -> str:
    """UUID of the current CUDA device, as nvidia-smi names it without its GPU- prefix."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
