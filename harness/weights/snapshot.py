"""What an engine's schedulers report of themselves: snapshots of their weights, and their GPUs; a sentinel fill of them."""

import shutil
import tempfile
from pathlib import Path

import torch.distributed as dist

from harness.cluster.world import World, all_gather
from harness.rollout.schedulers import call_schedulers
from harness.rollout.verl_engine import VerlEngine
from harness.weights.sync import WeightSync
from harness.weights.worker import model_state

Snapshot = dict[int, dict[str, int]]
"""Engine rank -> the engine's own name of a tensor -> a fingerprint of its bytes."""


def report_of_schedulers(engine: VerlEngine, what: str) -> list[model_state.WorkerReport]:
    """Let all schedulers report (model_state.report); return the reports of this host on the rank that built them.

    Empty on other ranks, and before sglang 0.4.8, which has no custom weight loaders. A collective call.
    """
    if not engine.api.custom_weight_loader:
        return []
    folder = Path(engine.on_head(lambda _: tempfile.mkdtemp(prefix="harness-inspect-")))
    call_schedulers(engine, model_state.REPORT, f"{what} {folder}", lambda ended: None)
    ranks = [engine.group.ranks.index(rank) for rank in engine.node.ranks]
    reports = model_state.read_reports(folder, ranks) if engine.is_builder else []
    dist.barrier(group=engine.group.process_group)
    shutil.rmtree(folder, ignore_errors=True)
    return reports


def snapshot_weights(engine: VerlEngine) -> Snapshot:
    """Return fingerprints of all that the schedulers of this host hold, on the rank that built them. Collective."""
    return {report.rank: report.tensors for report in report_of_schedulers(engine, "tensors")}


def changed_tensors(sync: WeightSync, before: Snapshot) -> list[str]:
    """Return the engine's tensors, of all ranks, that changed since a snapshot, each with its checkpoint names.

    A name that only one snapshot has is another name of a tensor, which SGLang makes when it first needs it (DeepSeek's
    attn_mha.kv_b_proj).
    """
    after = snapshot_weights(sync.engine)
    mine = {name for rank in before for name, held in before[rank].items() if after[rank].get(name, held) != held}
    return [describe_tensor(sync, name) for name in sorted({name for each in all_gather(mine) for name in each})]


def describe_tensor(sync: WeightSync, engine_name: str) -> str:
    """Return an engine's name of a tensor with the checkpoint tensors that it is made of: SGLang fuses some."""
    known = [tensor.name for tensor in sync.layout]
    parts = dict.fromkeys(part for each in sync.coverage for part in each.filled.get(engine_name, ()))
    module, _, attribute = engine_name.rpartition(".")  # what the engine derives, it derives from its module's
    derived_from = f"{module}.{model_state.DERIVED.get(attribute, '')}"
    names = list(parts) or [name for name in known if name.startswith(derived_from)]
    if engine_name in known or not names:
        return engine_name
    more = [f"{len(names) - 4} more"] if len(names) > 4 else []
    return f"{engine_name} ({', '.join([*names[:4], *more])})"


def fill_with_sentinel(engine: VerlEngine, seed: str) -> None:
    """Fill the engine's weights with garbage drawn from seed; needs custom weight loaders. A collective call."""
    call_schedulers(engine, model_state.SENTINEL, seed, lambda ended: None, flush_cache=True)


def check_gpus(world: World, engine: VerlEngine, colocate: bool) -> None:
    """Compare the GPUs of trainers and engines; a collective call of all ranks. See check_devices."""
    if world.device.type == "cuda":
        reports = report_of_schedulers(engine, "device")
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
