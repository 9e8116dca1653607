"""64-bit fingerprints of the trainer's weights: of what is sent, of what the model holds, and of what its forward passes
use.

Each rank sums up its shards, and the sums of all ranks add up to the whole tensor's (traced/model_state.py says how).
Nothing is gathered.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from harness.trainer.model import named_tensors
from harness.trainer.rank_sums import all_sum
from harness.trainer.rows import RowShards, own_rows
from harness.weights.sync import WeightSync
from harness.weights.traced.model_state import WRAP, Powers, weighted_sum
from harness.weights.trainer_weights import TrainerWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSums:
    """Fingerprints of the trainer's tensors; the same on every rank."""

    sent: Mapping[str, int]
    """Of what a sync sends, in the dtype in which it is sent."""
    held: Mapping[str, int]
    """Of the model's own tensors, read at the model and not at the sender, in the dtype in which the model computes."""

    sent_otherwise: tuple[str, ...] = ()
    """Names of tensors that are sent with other values than the model holds, though nothing is to convert them."""


def trainer_sums(sync: WeightSync) -> TrainerSums:
    """Return the fingerprints of what was sent last, and of the model as it is now. A collective call of all ranks."""
    sent, held = _as_sent(sync.weights), as_computed(sync.sent.held_tensors(), sync.sent.dtype)
    # Almost always they are the same tensors: then each is summed up once.
    own = {name: each for name, each in held.items() if name not in sent or not _is_same(each, sent[name])}
    sums = tensor_sums({f"sent/{name}": each for name, each in sent.items()} | own)
    of_sent = {name: sums[f"sent/{name}"] for name in sent}
    unconverted = [name for name in own if name in sent and own[name][1] == sent[name][1]]
    return TrainerSums(
        sent=of_sent,
        held={name: sums[name] if name in own else of_sent[name] for name in held},
        sent_otherwise=tuple(
            name for name in unconverted if sync.weights.converter.renames_only and sums[name] != of_sent[name]
        ),
    )


def sent_sums(weights: TrainerWeights) -> dict[str, int]:
    """Return the fingerprint of each tensor of a sync, in the dtype in which it is sent."""
    return tensor_sums(_as_sent(weights))


def as_computed(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> dict[str, tuple[torch.Tensor, torch.dtype]]:
    """Return tensors of a model, each with the dtype in which it is computed with: parameters in `dtype`, buffers as
    they are.
    """
    return {
        name: (each, dtype if dtype and isinstance(each, nn.Parameter) and each.is_floating_point() else each.dtype)
        for name, each in tensors.items()
    }


def _as_sent(weights: TrainerWeights) -> dict[str, tuple[torch.Tensor, torch.dtype]]:
    dtypes = {view.of: view.dtype for view in weights.layout}
    return {name: (tensor, dtypes[name]) for name, tensor in weights.tensors.items()}


def _is_same(one: tuple[torch.Tensor, torch.dtype], other: tuple[torch.Tensor, torch.dtype]) -> bool:
    return one[0] is other[0] and one[1] == other[1]


@torch.no_grad()
def tensor_sums(tensors: Mapping[str, tuple[torch.Tensor, torch.dtype]]) -> dict[str, int]:
    """Return the fingerprint of each of the trainer's tensors in this dtype, added up over all ranks' shards.

    Collective.
    """
    powers = Powers()
    sums = [_sum_of_shard(tensor, dtype, powers) for tensor, dtype in tensors.values()]
    totals = all_sum(torch.stack(sums)).tolist() if sums else []  # int64 wraps around, as a fingerprint does
    return {name: total % WRAP for name, total in zip(tensors, totals, strict=True)}


def _sum_of_shard(tensor: torch.Tensor, dtype: torch.dtype, powers: Powers) -> torch.Tensor:
    """Sum up this rank's rows of a tensor. A tensor that is not sharded counts on rank 0 alone."""
    first = own_rows(tensor).start * RowShards.of(tensor).row_elements
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    elif dist.get_rank() != 0:
        tensor = tensor.reshape(-1)[:0]
    return weighted_sum(tensor.detach().to(dtype).reshape(-1), (1,), first, powers)


@contextmanager
def forward_sums(model: nn.Module) -> Iterator[dict[str, int]]:
    """Yield a dict that has, after this block, the fingerprint of each parameter as the first forward pass in it used
    it.

    The parameters are shards, often wider than what is computed in: before each layer FSDP2 gathers them and casts
    them. Log-probs in bfloat16 do not show a copy that is one update old. model: sharded by FSDP2, unit by unit. Keys
    are the trainer's names.
    """
    units = {name: cast(nn.Module, each) for name, each in model.named_modules() if isinstance(each, FSDPModule)}
    names: dict[str, list[str]] = {unit: [] for unit in units}
    for name, tensor in named_tensors(model):
        if isinstance(tensor, nn.Parameter):
            names[max((unit for unit in units if _is_inside(name, unit)), key=len)].append(name)
    sums: dict[str, torch.Tensor] = {}
    powers = Powers()

    def sum_up(unit: str) -> None:
        for name in names[unit]:
            if name not in sums:
                values = model.get_parameter(name).detach()
                sums[name] = weighted_sum(values.reshape(-1), (1,), 0, powers)

    # FSDP2's own hook gathers a unit's parameters, and stands before all others.
    hooks = [module.register_forward_pre_hook(lambda *_, at=unit: sum_up(at)) for unit, module in units.items()]
    found: dict[str, int] = {}
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    totals = torch.stack(list(sums.values())).tolist() if sums else []
    found.update({name: total % WRAP for name, total in zip(sums, totals, strict=True)})


def _is_inside(name: str, unit: str) -> bool:
    return not unit or name.startswith(f"{unit}.")
