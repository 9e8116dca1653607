"""What an engine's schedulers hold, asked of themselves, and garbage put in its place."""

import shutil
import tempfile
from pathlib import Path

import torch.distributed as dist

from harness.rollout import sglang_api
from harness.rollout.schedulers import call_schedulers
from harness.rollout.verl_engine import VerlEngine
from harness.weights.worker import inspection
from harness.weights.worker.sentinel import SENTINEL

Snapshot = dict[int, dict[str, str]]
"""Engine rank -> the engine's own name of a tensor -> a digest of its bytes."""


def inspect(engine: VerlEngine, loader: str = inspection.INSPECT) -> list[inspection.WorkerReport]:
    """This host's schedulers' reports on the rank that built them; elsewhere, and where there is no door, none.

    loader: inspection.IDENTIFY leaves the digests out.
    A collective call of the engine's ranks. Before sglang 0.4.8 there is no door into the schedulers.
    """
    if not engine.api.custom_weight_loader:
        return []
    folder = Path(engine.on_head(lambda _: tempfile.mkdtemp(prefix="harness-inspect-")))
    call_schedulers(engine, loader, str(folder), _nothing)
    reports = inspection.read_reports(folder, len(engine.node.ranks)) if engine.is_builder else []
    dist.barrier(group=engine.group.process_group)
    shutil.rmtree(folder, ignore_errors=True)
    return reports


def snapshot_weights(engine: VerlEngine) -> Snapshot:
    """Digests of all that the schedulers hold; each scheduler's on one rank of the group, elsewhere none. Collective.

    SGLang's own checksum where it works, on GPUs since 0.5.13 and without pipeline stages; else the bytes' sha256 by our
    code in the schedulers. Two answers compare only within a run.
    """
    if has_checksum(engine):
        checksums = engine.on_head(lambda inner: sglang_api.check_weights(engine.api, inner, "checksum"))
        return {each.tp_rank: dict(each.tensors) for each in checksums} if engine.is_head else {}
    return {report.rank: report.tensors for report in inspect(engine)}


def has_checksum(engine: VerlEngine) -> bool:
    """Whether SGLang's own checksum speaks for every scheduler of this engine."""
    api = engine.api
    works = engine.device_type == "cuda" or not api.checksum_needs_cuda
    return "checksum" in api.weight_check_actions and api.checksum_covers_tp_ranks and works and engine.group.pp == 1


def changed(before: Snapshot, after: Snapshot) -> set[str]:
    """The engine's names of tensors that differ, on this rank's answers.

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
    """Fill the engine's weights with garbage drawn from seed. Raises ValueError where there is no door. Collective."""
    call_schedulers(engine, SENTINEL, seed, _nothing, flush_cache=True)


def _nothing(ended: object) -> None:
    """What the ranks do meanwhile."""
