"""Check that each engine rank runs on the GPU it should, as the schedulers themselves report."""

from harness.cluster.world import World, all_gather
from harness.rollout.verl_engine import VerlEngine
from harness.weights.snapshot import report_of_schedulers
from harness.weights.worker import model_state


def check_gpus(world: World, engine: VerlEngine, colocate: bool) -> None:
    """Compare the GPUs of trainers and engines; a collective call of all ranks. See check_devices."""
    if world.device.type == "cpu":
        return
    reports = report_of_schedulers(engine, model_state.IDENTIFY)
    engines = all_gather({engine.group.ranks[report.rank]: report.device for report in reports})
    known = {rank: gpu for each in engines for rank, gpu in each.items()}
    check_devices(all_gather(model_state.current_gpu_uuid()), known, colocate)


def check_devices(trainers: list[str], engines: dict[int, str], colocate: bool) -> None:
    """Raise ValueError when an engine rank is on a wrong GPU.

    trainers: GPU UUID by world rank; engines: of the ranks that are known. With colocate a trainer rank and its engine
    rank share a GPU; without, an engine rank shares none with a trainer or another engine rank.
    """
    owners = {gpu: rank for rank, gpu in enumerate(trainers)}
    users: dict[str, int] = {}
    advice = "check CUDA_VISIBLE_DEVICES of that host's ranks."
    for rank, gpu in sorted(engines.items()):
        if colocate and gpu != trainers[rank]:
            raise ValueError(
                f"rank {rank} trains on GPU {trainers[rank]} but its engine rank runs on GPU {gpu}; {advice}"
            )
        if not colocate and gpu in owners:
            raise ValueError(
                f"parallel.colocate = false, but the engine rank of rank {rank} runs on GPU {gpu}, on which rank"
                f" {owners[gpu]} trains; {advice}"
            )
        if users.setdefault(gpu, rank) != rank:
            raise ValueError(
                f"the engine ranks of ranks {users[gpu]} and {rank} both run on GPU {gpu}, but each needs its own; {advice}"
            )
