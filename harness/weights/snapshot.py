"""What an engine's schedulers report of themselves: snapshots of their weights, and their GPUs; a sentinel fill of them."""

import shutil
import tempfile
from pathlib import Path

import torch.distributed as dist

from harness.cluster.world import World, all_gather
from harness.rollout.schedulers import call_schedulers
from harness.rollout.verl_engine import VerlEngine
from harness.weights.worker import model_state

Snapshot = dict[int, dict[str, int]]
"""Engine rank -> the engine's own name of a tensor -> a fingerprint of its bytes."""


def report_of_schedulers(engine: VerlEngine, function: str) -> list[model_state.WorkerReport]:
    """Call a function that reports in all schedulers; return the reports of this host on the rank that built them.

    Empty on other ranks, and before sglang 0.4.8, which has no custom weight loaders. A collective call of the engine's
    ranks.
    """
    if not engine.api.custom_weight_loader:
        return []
    folder = Path(engine.on_head(lambda _: tempfile.mkdtemp(prefix="harness-inspect-")))
    call_schedulers(engine, function, str(folder), lambda ended: None)
    reports = model_state.read_reports(folder, len(engine.node.ranks)) if engine.is_builder else []
    dist.barrier(group=engine.group.process_group)
    shutil.rmtree(folder, ignore_errors=True)
    return reports


def snapshot_weights(engine: VerlEngine) -> Snapshot:
    """Return fingerprints of all that the schedulers of this host hold, on the rank that built them. Collective."""
    return {report.rank: report.tensors for report in report_of_schedulers(engine, model_state.SNAPSHOT)}


def changed_names(before: Snapshot, after: Snapshot) -> set[str]:
    """Return the engine's names of tensors that differ, in the snapshots of this rank.

    A name that only one of them has is another name of a tensor, which SGLang makes when it first needs it (DeepSeek's
    attn_mha.kv_b_proj).
    """
    return {
        name
        for rank, tensors in before.items()
        for name in tensors.keys() & after[rank].keys()
        if tensors[name] != after[rank][name]
    }


def fill_with_sentinel(engine: VerlEngine, seed: str) -> None:
    """Fill the engine's weights with garbage drawn from seed; needs custom weight loaders. A collective call."""
    call_schedulers(engine, model_state.SENTINEL, seed, lambda ended: None, flush_cache=True)


def check_gpus(world: World, engine: VerlEngine, colocate: bool) -> None:
    """Compare the GPUs of trainers and engines; a collective call of all ranks. See check_devices."""
    if world.device.type == "cuda":
        reports = report_of_schedulers(engine, model_state.IDENTIFY)
        engines = all_gather({engine.group.ranks[report.rank]: report.device for report in reports})
        known = {rank: gpu for each in engines for rank, gpu in each.items()}
        check_devices(all_gather(model_state.current_gpu_uuid()), known, colocate)


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
