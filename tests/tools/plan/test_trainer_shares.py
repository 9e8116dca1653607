"""A rank's share and the sync's buckets are those of real FSDP2 models and of the real planner, under fake groups."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from harness.config.schema import ActorConfig, Config
from harness.tools.plan import memory_estimate
from harness.tools.plan.memory_estimate import largest_bucket, trainer_share
from harness.tools.plan.model_shapes import ModelShape, model_fields, model_shape
from harness.tools.tiny_models import ARCHITECTURES, tiny_config
from harness.trainer.actor import Actor
from harness.trainer.model import load_causal_lm, named_tensors
from harness.trainer.offload import storages_of
from harness.weights.gather import plan_buckets
from harness.weights.groups import ALIGNMENT
from harness.weights.names import checkpoint_layout

SHAPE = {"num_hidden_layers": 3}


def _models(
    name: str, ranks: int, folder: str, value: bool = False, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.nn.Module, ModelShape]:
    """Rank 0's model among so many ranks, of which the fake group stands in for the others, and its shape."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    tiny_config(name, overrides=SHAPE).save_pretrained(folder)
    cpu, compute = torch.device("cpu"), torch.bfloat16
    model = load_causal_lm(folder, dtype, cpu, mesh, weights="random", compute_dtype=compute, value_head=value)
    return model, model_shape(model_fields(name, SHAPE, "cpu"))


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("ranks", [2, 16])  # 8 experts: of 16 ranks half hold padding
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_rank_holds_what_was_counted(name: str, ranks: int, value: bool, tmp_path: object) -> None:
    master = torch.bfloat16 if value else torch.float32
    try:
        model, shape = _models(name, ranks, str(tmp_path), value, master)
        share = trainer_share(shape, ranks, master=master.itemsize, compute=2, head=not value)
        tensors = [tensor for _, tensor in named_tensors(model)]
        assert sum(storage.nbytes() for storage in storages_of(tensors)) == share.parameters
        config = Config(actor=ActorConfig(minibatch_size=ranks))
        learner = Actor(model, config, init_device_mesh("cpu", (ranks,)), torch.device("cpu"))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        learner.optimizer.step()
        states = sum(storage.nbytes() for storage in storages_of(learner.moments()))
        assert states == 2 * share.gradients
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [3, 16])
@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_the_largest_bucket_is_the_planner_s(name: str, ranks: int, tmp_path: object) -> None:
    try:
        model, shape = _models(name, ranks, str(tmp_path), dtype=torch.float32)
        live = dict(named_tensors(model))
        layout = checkpoint_layout(model, live, torch.bfloat16)
        for limit in (1 << 10, 1 << 16, 1 << 20, 1 << 24):
            planned = max(bucket.nbytes for bucket in plan_buckets(layout, live, limit))
            assert largest_bucket(shape, ranks, 2, limit) == planned
    finally:
        dist.destroy_process_group()


def test_tensors_are_aligned_as_in_a_bucket() -> None:
    assert memory_estimate.ALIGNMENT == ALIGNMENT
