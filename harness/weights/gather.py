"""From shards to full tensors, in buckets of bytes that never split what the engine fuses on arrival."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from harness.weights.names import CheckpointTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Checkpoint tensors that one call carries."""

    tensors: tuple[CheckpointTensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def live_names(self) -> tuple[str, ...]:
        """Live tensors to gather, each once, in order."""
        return tuple(dict.fromkeys(tensor.live_name for tensor in self.tensors))


def plan_buckets(layout: Iterable[CheckpointTensor], limit_bytes: int) -> tuple[Bucket, ...]:
    """Fill buckets up to limit_bytes, group by group; a larger group gets a bucket of its own.

    A group is what one engine module may fuse, such as q_a_proj and kv_a_proj_with_mqa of one self_attn: SGLang keeps
    the halves it waits for only until the call returns, and then drops them without a word.
    """
    groups: dict[str, list[CheckpointTensor]] = {}
    for tensor in layout:
        groups.setdefault(_fusing_group(tensor), []).append(tensor)
    buckets: list[list[CheckpointTensor]] = []
    filled = 0
    for group in groups.values():
        # By name: an engine that derives the fused name from the last half to arrive (0.4.6) expects kv_a before q_a.
        ordered = sorted(group, key=lambda tensor: tensor.name)
        size = sum(tensor.nbytes for tensor in ordered)
        if not buckets or filled + size > limit_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].extend(ordered)
        filled += size
    return tuple(Bucket(tensors=tuple(tensors)) for tensors in buckets)


def gather(bucket: Bucket, live: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The bucket's tensors, full and contiguous, under their checkpoint names.

    live: by live name; DTensors are gathered over their mesh, so every rank of it must call this with the same bucket.
    """
    full = {name: full_tensor(live[name]) for name in bucket.live_names}
    return [(tensor.name, tensor.view(full[tensor.live_name]).contiguous()) for tensor in bucket.tensors]


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, contiguous and detached, whether it is sharded or not."""
    tensor = tensor.detach()
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.contiguous()


def _fusing_group(tensor: CheckpointTensor) -> str:
    """The live tensor for experts (an expert fuses within itself), else the module above the one that owns it."""
    if ".experts." in tensor.live_name:
        # An unfused expert is experts.3.gate_proj.weight: its own module, experts.3, is the group.
        path, _, rest = tensor.live_name.partition(".experts.")
        return f"{path}.experts.{rest.split('.')[0]}"
    return tensor.live_name.rsplit(".", 2)[0]
