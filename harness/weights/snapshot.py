"""Snapshots of what an engine's schedulers hold, and a sentinel fill in its place."""

import shutil
import tempfile
from pathlib import Path

import torch.distributed as dist

from harness.rollout.schedulers import call_schedulers
from harness.rollout.verl_engine import VerlEngine
from harness.weights.worker import model_state

Snapshot = dict[int, dict[str, str]]
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
