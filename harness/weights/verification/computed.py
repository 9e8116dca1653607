"""Fingerprints of the weights that a forward pass of the trainer really computes with: FSDP2's gathered copies.

The trainer's parameters are shards, often wider than what it computes in. Before each layer FSDP2 gathers them and
casts them to the compute dtype. Log-probs in bfloat16 do not show a copy that is one update old.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from harness.trainer.model import named_tensors
from harness.weights.traced.model_state import WRAP, Powers, weighted_sum


@contextmanager
def fingerprints_of_forward(model: nn.Module) -> Iterator[dict[str, int]]:
    """Yield a dict that has, after this block, the fingerprint of each parameter as the first forward pass in it used
    it.

    model: sharded by FSDP2, unit by unit. Keys are the trainer's names.
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
