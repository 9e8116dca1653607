"""Snapshots of what an engine's schedulers hold, and what changed since."""

from harness.cluster.world import all_gather
from harness.rollout.verl_engine import VerlEngine
from harness.tools.verification import in_scheduler
from harness.weights.sync import WeightSync
from harness.weights.worker.model_state import DERIVED

Snapshot = dict[str, int]
"""The engine's own name of a tensor -> a fingerprint of its bytes, in the scheduler beside this rank."""


def snapshot_weights(engine: VerlEngine) -> Snapshot:
    """Return fingerprints of all that the scheduler beside this rank holds; empty before sglang 0.4.8. Collective."""
    if not engine.api.custom_weight_loader:
        return {}
    with engine.weight_update():
        return engine.ask(in_scheduler.held_tensors)


def changed_tensors(sync: WeightSync, before: Snapshot) -> list[str]:
    """Return the engine's tensors, of all ranks, that changed since a snapshot, each with its checkpoint names.

    A name that only one snapshot has is another name of a tensor, which SGLang makes when it first needs it (DeepSeek's
    attn_mha.kv_b_proj).
    """
    after = snapshot_weights(sync.engine)
    mine = {name for name, held in before.items() if after.get(name, held) != held}
    return [describe_tensor(sync, name) for name in sorted({name for each in all_gather(mine) for name in each})]


def describe_tensor(sync: WeightSync, engine_name: str) -> str:
    """Return an engine's name of a tensor with the checkpoint tensors that it is made of: SGLang fuses some."""
    known = [tensor.name for tensor in sync.layout]
    parts = dict.fromkeys(part for each in sync.link.coverage for part in each.filled.get(engine_name, ()))
    module, _, attribute = engine_name.rpartition(".")  # what the engine derives, it derives from its module's
    derived_from = f"{module}.{DERIVED.get(attribute, '')}"
    names = list(parts) or [name for name in known if name.startswith(derived_from)]
    if engine_name in known or not names:
        return engine_name
    more = [f"{len(names) - 4} more"] if len(names) > 4 else []
    return f"{engine_name} ({', '.join([*names[:4], *more])})"
