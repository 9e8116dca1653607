"""Two ranks train with everything on the device, and with each thing offloaded.

Arguments: file for the results, folder for the model's config.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from harness.config import schema
from harness.task.tiny_models import tiny_config
from harness.trainer.actor import Actor, Reference
from harness.trainer.critic import Critic
from harness.trainer.model import load_causal_lm, named_tensors
from harness.trainer.offload import local
from tests.trainer.sequences import advantage_batch, sequences
from tests.trainer.training import train as train_from_a_seed

CPU = torch.device("cpu")
LEARNERS: Any = ("actor", "critic")
CASES = {
    "nothing": schema.Memory(),
    "parameters": schema.Memory(offload_parameters=LEARNERS),
    "optimizer": schema.Memory(offload_optimizer=LEARNERS),
    "everything": schema.Memory(offload_parameters=LEARNERS, offload_optimizer=LEARNERS),
}


def digest(model: torch.nn.Module) -> str:
    """Return one digest of all weights, which it gathers from all ranks first."""
    total = hashlib.sha256()
    for name, tensor in named_tensors(model):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        total.update(name.encode() + whole.detach().numpy().tobytes())
    return total.hexdigest()


def shard_bytes(model: torch.nn.Module) -> int:
    """Bytes that this rank's shards have now."""
    return sum(local(parameter).untyped_storage().nbytes() for parameter in model.parameters())


def state_bytes(learner: Any) -> int:
    """Bytes that the optimizer's states have now, step counts left out."""
    return sum(local(state).untyped_storage().nbytes() for state in learner.moments())


def train(path: str, mesh: DeviceMesh, memory: schema.Memory) -> dict[str, Any]:
    """Log-probs, values, metrics and weights of two rounds of updates, and what had memory when nothing was in use."""
    batch = advantage_batch(*sequences(), slice(dist.get_rank() * 4, dist.get_rank() * 4 + 4))
    model = load_causal_lm(path, torch.float32, CPU, mesh, weights="random", seed=5)
    value_model = load_causal_lm(path, torch.float32, CPU, mesh, weights="random", seed=5, value_head=True)
    sizes = schema.ActorConfig(minibatch_size=4, microbatch_size=1, ppo_epochs=2, learning_rate=1e-3, max_grad_norm=0.3)
    values = schema.CriticConfig(learning_rate=1e-3)
    config = schema.Config(actor=sizes, critic=values, memory=memory)
    actor, critic = Actor(model, config, mesh, CPU), Critic(value_model, config, mesh, CPU)
    objects = dict(named_tensors(model))
    result: dict[str, Any] = {"idle": [], "rounds": []}
    generator = torch.Generator().manual_seed(7)
    for _ in range(2):
        with actor.on_device():
            log_probs = actor.log_probs(batch)[0]
        with critic.on_device():
            old = critic.values(batch)
        with critic.learning():
            critic_metrics = critic.update(batch.replace(old_values=old), generator)
        with actor.learning():
            metrics = actor.update(batch, generator)
            with actor.on_device():  # contexts nest
                pass
            busy = [shard_bytes(model), state_bytes(actor)]
        result["idle"].append([shard_bytes(model), state_bytes(actor), shard_bytes(value_model)])
        with actor.on_device(), critic.on_device():
            weights = [digest(model), digest(value_model)]
        result["rounds"].append([log_probs.tolist(), old.tolist(), metrics, critic_metrics, weights])
    result["busy"] = busy
    result["same_objects"] = all(objects[name] is tensor for name, tensor in named_tensors(model))
    result["gradients"] = sum(parameter.grad is not None for parameter in model.parameters())
    return result


def main() -> None:
    dist.init_process_group("gloo")
    folder = Path(sys.argv[2]) / "model"
    if dist.get_rank() == 0:
        tiny_config("qwen2", overrides={"vocab_size": 321}).save_pretrained(folder)  # shards of unequal size
    dist.barrier()
    mesh = init_device_mesh("cpu", (2,))
    results: dict[str, Any] = {name: train(str(folder), mesh, memory) for name, memory in CASES.items()}
    frozen = load_causal_lm(str(folder), torch.float32, CPU, mesh, weights="random", seed=5)
    config_of_all = schema.Config(
        actor=schema.ActorConfig(microbatch_size=1), memory=schema.Memory(offload_parameters=("reference",))
    )
    reference = Reference(frozen, config_of_all, mesh, CPU)
    batch = advantage_batch(*sequences(), slice(dist.get_rank() * 4, dist.get_rank() * 4 + 4))
    idle = shard_bytes(frozen)
    with reference.on_device():
        results["reference"] = {"idle": idle, "log_probs": reference.log_probs(batch)[0].tolist()}
    results["training"] = train_from_a_seed(Path(sys.argv[2]) / "training", mesh)
    ranks: list[Any] = [None] * 2
    dist.all_gather_object(ranks, results)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(ranks))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    from harness.runtime.processes import hard_exit

    hard_exit(0)
