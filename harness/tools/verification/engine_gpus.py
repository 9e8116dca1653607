"""Each engine rank is on the GPU that the config says."""

from harness.cluster.world import World, all_gather
from harness.rollout.verl_engine import VerlEngine
from harness.tools.verification.in_scheduler import current_gpu_uuid


def check_gpus(world: World, engine: VerlEngine, colocate: bool) -> None:
    """Compare the GPUs of trainers and engines; a collective call of all ranks. See check_devices."""
    if world.device.type == "cuda":
        asked = engine.api.custom_weight_loader
        found = all_gather(engine.ask(current_gpu_uuid) if asked else None)
        engines = {rank: gpu for rank, gpu in enumerate(found) if gpu is not None}
        check_devices(all_gather(current_gpu_uuid()), engines, colocate)


def check_devices(trainers: list[str], engines: dict[int, str], colocate: bool) -> None:
    """Raise ValueError when an engine rank is on a wrong GPU.

    trainers: GPU UUID by world rank; engines: of the ranks that are known. With colocate a trainer rank and its engine
    rank share a GPU; without, an engine rank shares none with a trainer or another engine rank.
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
