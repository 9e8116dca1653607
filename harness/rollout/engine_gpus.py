"""Check that each engine rank is on the GPU that the config says."""

from typing import Any

import torch

from harness.cluster.world import World, all_gather
from harness.rollout.engine import RolloutEngine


def check_gpus(world: World, engine: RolloutEngine, colocate: bool) -> None:
    """Compare the GPUs of trainers and engine ranks; see check_devices. A collective call of all ranks."""
    if world.device.type == "cuda":
        found = all_gather(engine.ask(current_gpu_uuid) if engine.can_ask else None)
        engines = {rank: gpu for rank, gpu in enumerate(found) if gpu is not None}
        check_devices(all_gather(current_gpu_uuid()), engines, colocate)


def check_devices(trainers: list[str], engines: dict[int, str], colocate: bool) -> None:
    """Raise ValueError if an engine rank is on a wrong GPU.

    trainers: GPU UUID by world rank. engines: GPU UUID of the engine ranks that are known. With colocate a trainer rank
    and its engine rank share a GPU; without, an engine rank shares its GPU with no trainer and no other engine rank.
    """
    users = {} if colocate else {gpu: f"rank {rank} trains there" for rank, gpu in enumerate(trainers)}
    for rank, gpu in sorted(engines.items()):
        misplaced = colocate and gpu != trainers[rank]
        problem = f"its trainer is on GPU {trainers[rank]}" if misplaced else users.get(gpu)
        if problem:
            raise ValueError(
                f"the engine rank of rank {rank} runs on GPU {gpu}, but {problem} (parallel.colocate ="
                f" {str(colocate).lower()}); check CUDA_VISIBLE_DEVICES of that host's ranks."
            )
        users[gpu] = f"so does the engine rank of rank {rank}"


def current_gpu_uuid(*_: Any) -> str:
    """Return the UUID of the current CUDA device, as nvidia-smi names it without its GPU- prefix."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
