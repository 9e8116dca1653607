"""What runs inside SGLang's schedulers: named as a custom weight loader, SGLang calls it in every rank of the engine.

It is the one door into the schedulers that needs no HTTP (sglang 0.4.8 and newer). A loader gets the model and
(name, tensor) pairs and returns nothing, so the name carries the folder that the answer is written to.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

INSPECT = "harness.weights.worker.inspection.inspect_model"
IDENTIFY = "harness.weights.worker.inspection.identify"
LOADERS = (INSPECT, IDENTIFY)
REPORT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReport:
    """What one scheduler holds."""

    rank: int
    """Engine rank: pp major, then tp."""
    device: str
    """UUID of its GPU, or "cpu"."""
    tensors: dict[str, str]
    """sha256 of each parameter's and buffer's bytes, by the engine's own (fused, sharded) names; of another loader, what it
    says of them."""


def inspect_model(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Write this scheduler's WorkerReport into the folder that the first name gives. Changes no weight."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    write_report(model, {name: tensor_digest(tensor) for name, tensor in tensors.items()}, Path(named_tensors[0][0]))


def identify(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """As inspect_model, without the digests, which take seconds for a large model."""
    write_report(model, {}, Path(named_tensors[0][0]))


def write_report(model: Any, tensors: dict[str, str], folder: Path) -> None:
    """Write this scheduler's WorkerReport, whole or not at all, into the folder."""
    rank = dist.get_rank()
    device = gpu_uuid() if next(model.parameters()).is_cuda else "cpu"
    report = WorkerReport(rank=rank, device=device, tensors=tensors)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"rank{rank}.unfinished"
    unfinished.write_text(json.dumps(asdict(report)), encoding="utf-8")
    unfinished.rename(folder / f"rank{rank}.json")  # whoever waits for the file finds it whole


def read_reports(folder: Path, count: int) -> list[WorkerReport]:
    """The reports of this host's `count` schedulers, by engine rank; the engine answers for its first stage alone.

    Raises TimeoutError when one does not come.
    """
    deadline = time.monotonic() + REPORT_SECONDS
    while len(list(folder.glob("rank*.json"))) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{folder} has not {count} reports of schedulers after {REPORT_SECONDS:.0f} s.")
        time.sleep(0.01)
    reports = [WorkerReport(**json.loads(file.read_text(encoding="utf-8"))) for file in folder.glob("rank*.json")]
    return sorted(reports, key=lambda report: report.rank)


def tensor_digest(tensor: torch.Tensor) -> str:
    """sha256 of a tensor's bytes in row-major order, whatever its strides."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def gpu_uuid() -> str:
    """UUID of the current CUDA device, as nvidia-smi names it without its GPU- prefix."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
