"""Which weights a forward pass of a sharded model computes with."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from harness.trainer.model import named_tensors
from harness.weights.verification.trainer_sums import as_computed, forward_sums, tensor_sums
from tests.cluster.gloo import on_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def _wrong(rank: int, dtype: torch.dtype, stale: bool) -> set[str]:
    """The parameters that a forward pass uses otherwise than the shards hold, without or with a fault."""
    model, mesh = Model(), init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    held = tensor_sums(as_computed(dict(named_tensors(model)), dtype))
    if stale:  # the pass sees the weights of before, and the shards are right again after it
        model.layers[1].register_forward_pre_hook(
            lambda module, _: module.weight.data.copy_(torch.zeros_like(module.weight))
        )
    with torch.no_grad(), forward_sums(model) as computed:
        model(torch.arange(9))
    assert set(computed) == set(held)
    return {name for name, found in computed.items() if found != held[name]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_other_weights_is_named_and_a_right_one_is_not(dtype: torch.dtype, tmp_path: Path) -> None:
    assert on_ranks(_wrong, 2, tmp_path, dtype, False) == [set(), set()]
    (tmp_path / "stale").mkdir()
    assert on_ranks(_wrong, 2, tmp_path / "stale", dtype, True) == [{"layers.1.weight"}] * 2
