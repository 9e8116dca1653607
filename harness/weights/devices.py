"""Does each engine rank run on the GPU it should? Asked of the schedulers, not of the plan."""

from harness.cluster.world import World, all_gather
from harness.rollout.verl_engine import VerlEngine
from harness.weights.snapshot import inspect
from harness.weights.worker import inspection


def engine_devices(engine: VerlEngine) -> dict[int, str]:
    """World rank -> GPU UUID of the scheduler that belongs to it, or "cpu". A collective call of the engine's ranks.

    Only what this rank knows. Empty where this sglang has no door into its schedulers (before 0.4.8).
    """
    return {engine.group.ranks[report.rank]: report.device for report in inspect(engine, inspection.IDENTIFY)}


def check_gpus(world: World, engine: VerlEngine, colocate: bool) -> None:
    """Compare the GPUs of trainers and engines; a collective call of all ranks. See check_devices."""
    if world.device.type == "cpu":
        return
    engines: dict[int, str] = {}
    for each in all_gather(engine_devices(engine)):
        engines |= each
    check_devices(all_gather(inspection.gpu_uuid()), engines, colocate)


def check_devices(trainers: list[str], engines: dict[int, str], colocate: bool) -> None:
    """trainers: GPU UUID by world rank; engines: of the ranks that are known.

    Raises ValueError when, with colocate, a trainer rank and its engine rank sit on different GPUs, or,
    without it, an engine rank sits on any trainer's GPU or on another engine rank's.
    """
    owners = {gpu: rank for rank, gpu in enumerate(trainers)}
    taken: dict[str, int] = {}
    for rank, gpu in sorted(engines.items()):
        if colocate and gpu != trainers[rank]:
            raise ValueError(
                f"rank {rank} trains on GPU {trainers[rank]} but its engine rank runs on GPU {gpu};"
                " check CUDA_VISIBLE_DEVICES of that host's ranks."
            )
        if not colocate and gpu in owners:
            raise ValueError(
                f"parallel.colocate = false, but the engine rank of rank {rank} runs on GPU {gpu}, on which rank"
                f" {owners[gpu]} trains; check CUDA_VISIBLE_DEVICES of that host's ranks."
            )
        if taken.setdefault(gpu, rank) != rank:
            raise ValueError(
                f"the engine ranks of ranks {taken[gpu]} and {rank} both run on GPU {gpu}, but each needs its own;"
                " check CUDA_VISIBLE_DEVICES of that host's ranks."
            )
