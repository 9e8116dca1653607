"""Are the trainer's own tensors fit to be sent? Asked of every rank before any of them gathers."""

from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor

from harness.cluster.world import all_gather
from harness.weights.gather import Chunks
from harness.weights.names import CheckpointTensor
from harness.weights.presync_checks import WeightsRefused


def check_shards(live: Mapping[str, torch.Tensor]) -> None:
    """Raises WeightsRefused, on every rank, naming the tensor and the rank, where a shard is missing or ranks do not
    agree on a tensor's name, shape or dtype. A collective call of all ranks."""
    mine = {name: (tuple(tensor.shape), str(tensor.dtype), _missing_rows(tensor)) for name, tensor in live.items()}
    everyone = all_gather(mine)
    for name in dict.fromkeys(name for each in everyone for name in each):
        seen = [each.get(name) for each in everyone]
        for rank, one in enumerate(seen):
            if one is None:
                raise WeightsRefused(f"{name}: rank {rank} has none, but every rank must hold its shard.")
            if one[:2] != seen[0][:2]:
                raise WeightsRefused(f"{name}: {one[:2]} on rank {rank} but {seen[0][:2]} on rank 0.")
            if one[2]:
                raise WeightsRefused(f"{name}: rank {rank} {one[2]}")


def check_covered(layout: Iterable[CheckpointTensor], live: Mapping[str, torch.Tensor]) -> None:
    """Raises WeightsRefused, naming the tensor, where the checkpoint's tensors are not all of a live one's elements."""
    sent = dict.fromkeys(live, 0)
    for part in layout:
        sent[part.live_name] += torch.Size(part.shape).numel()
    for name, tensor in live.items():
        if sent[name] != tensor.numel():
            raise WeightsRefused(f"{name}: the checkpoint's tensors hold {sent[name]} of its {tensor.numel()} elements")


def check_finite(live: Mapping[str, torch.Tensor]) -> None:
    """Raises WeightsRefused, on every rank, naming the tensors that hold a NaN or an infinity. A collective call."""
    local = {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in live.items()}
    # Zero times a finite number is zero; the sum carries any NaN on, without a temporary as large as the tensor.
    sums = {
        name: tensor.detach().mul(0).sum(dtype=torch.float32)
        for name, tensor in local.items()
        if tensor.is_floating_point()
    }
    wrong = [name for name, bad in zip(sums, torch.stack(list(sums.values())).isnan().tolist(), strict=True) if bad]
    found = {name: rank for rank, names in reversed(list(enumerate(all_gather(wrong)))) for name in names}
    if found:
        listed = ", ".join(f"{name} (rank {rank})" for name, rank in list(found.items())[:8])
        raise WeightsRefused(f"{len(found)} tensor(s) hold a NaN or an infinity: {listed}; nothing was sent.")


def _missing_rows(tensor: torch.Tensor) -> str:
    """What this rank lacks, "" where it holds its part."""
    if tensor.device.type == "meta":
        return "has it on the meta device, without values"
    if not isinstance(tensor, DTensor):
        return ""
    chunks = Chunks.of(tensor, tensor.dtype)
    first = min(tensor.device_mesh.get_local_rank() * chunks.rows, tensor.shape[0])
    due = min(chunks.rows, tensor.shape[0] - first)
    held = tensor.to_local().shape[0]
    return "" if held == due else f"holds {held} of the {due} rows of its shard"
