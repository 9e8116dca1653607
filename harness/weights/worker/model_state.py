"""The tensors of a scheduler's model: which there are, a report of what they hold, and a sentinel fill.

`report_*` and `fill_with_sentinel` run in every scheduler of the engine, as harness.rollout.schedulers calls them: with
the model and one (text, tensor) pair. They return nothing, so the text names the folder that a report is written to.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

INSPECT = f"{__name__}.report_digests"
IDENTIFY = f"{__name__}.report_device"
SENTINEL = f"{__name__}.fill_with_sentinel"
REPORT_SECONDS = 60.0
# Plain attributes that SGLang makes of kv_b_proj as it loads it: MLA computes with these alone.
DERIVED = ("w_kc", "w_vc")

Call = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReport:
    """What one scheduler holds."""

    rank: int
    """Engine rank: pp major, then tp."""
    device: str
    """UUID of its GPU, or "cpu"."""
    tensors: dict[str, str]
    """sha256 of each parameter and buffer by the engine's own (fused, sharded) names, or what else was asked for."""


def report_digests(model: Any, call: Call) -> None:
    """Report the digest of each parameter and buffer."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    write_report(model, {name: tensor_digest(tensor) for name, tensor in tensors.items()}, call)


def report_device(model: Any, call: Call) -> None:
    """Report without digests, which take seconds for a large model."""
    write_report(model, {}, call)


def write_report(model: Any, tensors: dict[str, str], call: Call) -> None:
    """Write the WorkerReport of this scheduler, whole or not at all."""
    folder, rank = Path(call[0][0]), dist.get_rank()
    device = gpu_uuid() if next(model.parameters()).is_cuda else "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"rank{rank}.unfinished"
    report = WorkerReport(rank=rank, device=device, tensors=tensors)
    unfinished.write_text(json.dumps(asdict(report)), encoding="utf-8")
    unfinished.rename(folder / f"rank{rank}.json")


def read_reports(folder: Path, count: int) -> list[WorkerReport]:
    """Wait for the reports of the `count` schedulers of this host: the engine answers for its first stage alone.

    Raise TimeoutError when one does not come.
    """
    deadline = time.monotonic() + REPORT_SECONDS
    while len(files := list(folder.glob("rank*.json"))) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{folder} has not {count} reports of schedulers after {REPORT_SECONDS:.0f} s.")
        time.sleep(0.01)
    reports = [WorkerReport(**json.loads(file.read_text(encoding="utf-8"))) for file in files]
    return sorted(reports, key=lambda report: report.rank)


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the sha256 of the bytes in row-major order, whatever the strides."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def gpu_uuid() -> str:
    """Return the UUID of the current CUDA device, as nvidia-smi names it without its GPU- prefix."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


@torch.no_grad()
def fill_with_sentinel(model: Any, call: Call) -> None:
    """Fill all that a sync must bring with values uniform in (-0.5, 0.5), from the seed that the text of the call gives.

    Finite, since a NaN in the logits would kill the sampler before anything is compared. Integers and 8-bit floats, which
    no unquantized model has among its weights, stay as they are.
    """
    for name, tensor in synced_tensors(model):
        if tensor.is_floating_point() and tensor.itemsize > 1:
            digest = hashlib.sha256(f"{call[0][0]}/{name}".encode()).digest()
            generator = torch.Generator(tensor.device).manual_seed(int.from_bytes(digest[:4], "little"))
            tensor.uniform_(-0.5, 0.5, generator=generator)


def synced_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, persistent buffers and what is derived from them; others, such as rotary caches, are not sent."""
    yield from model.named_parameters()
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer
        for name in DERIVED:
            if isinstance(getattr(module, name, None), torch.Tensor):
                yield f"{path}.{name}", getattr(module, name)


def derived_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that modules keep as plain attributes, such as DeepSeek's absorbed w_kc and w_vc."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def model_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return parameters, buffers and plain tensor attributes by name."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return tensors | derived_tensors(model)


def storage(tensor: torch.Tensor) -> int:
    """Return the address of the memory that a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()


class Addresses:
    """Where the tensors of a model lie that some copies fill; SGLang may put others in their place."""

    def __init__(self, model: Any, targets: Iterable[torch.Tensor]) -> None:
        filled = {storage(target) for target in targets}
        found = model_tensors(model).items()
        self.by_name = {name: tensor.data_ptr() for name, tensor in found if storage(tensor) in filled}

    def still_hold(self, model: Any) -> bool:
        """Return whether all tensors lie where they did."""
        now = model_tensors(model)
        return all(name in now and now[name].data_ptr() == at for name, at in self.by_name.items())
