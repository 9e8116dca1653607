"""A training from a seed, for workers of two processes to compare."""

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.config import schema
from harness.task.tiny_models import tiny_config
from harness.trainer.actor import Actor
from harness.trainer.model import load_causal_lm, named_tensors
from tests.trainer.sequences import advantage_batch, sequences


def train(folder: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """Digests of the weights around two updates of two epochs of two minibatches, and the updates' metrics."""
    if dist.get_rank() == 0:
        tiny_config("qwen3_moe").save_pretrained(folder)
    dist.barrier()
    cpu = torch.device("cpu")
    batch = advantage_batch(*sequences(), slice(dist.get_rank() * 4, dist.get_rank() * 4 + 4))
    model = load_causal_lm(str(folder), torch.float32, cpu, mesh, weights="random", seed=5)
    updates = schema.ActorConfig(minibatch_size=4, microbatch_size=1, ppo_epochs=2, learning_rate=1e-3)
    actor = Actor(model, schema.Config(actor=updates), mesh, cpu)
    digests, metrics, generator = [], [], torch.Generator().manual_seed(7)
    for step in range(3):
        if step:
            metrics.append(actor.update(batch, generator))
        digest = hashlib.sha256()
        for name, tensor in named_tensors(model):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            digest.update(name.encode() + whole.detach().numpy().tobytes())
        digests.append(digest.hexdigest())
    return {"digests": digests, "metrics": metrics}
