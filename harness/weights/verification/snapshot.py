"""Snapshots of what an engine's schedulers hold, and what changed since."""

from collections.abc import Sequence

from harness.cluster.world import all_gather
from harness.rollout.engine import RolloutEngine
from harness.rollout.served_models import TARGET
from harness.weights.loader import EngineLoader
from harness.weights.tensor_view import TensorView
from harness.weights.traced.model_state import DERIVED
from harness.weights.worker import compare_tensors

Snapshot = dict[str, int]
"""The engine's own name of a tensor -> a fingerprint of its bytes, in the scheduler next to this rank."""


def snapshot_weights(engine: RolloutEngine) -> Snapshot:
    """Return fingerprints of all that the scheduler next to this rank holds. A collective call of all ranks."""
    with engine.weight_update():
        return engine.ask(compare_tensors.held_tensors)


def changed_tensors(loader: EngineLoader, before: Snapshot) -> list[str]:
    """Return the engine's tensors, of all ranks, that changed since a snapshot, each with its checkpoint names.

    A name that only one snapshot has is another name of a tensor, which SGLang makes when it first needs it (DeepSeek's
    attn_mha.kv_b_proj).
    """
    after = snapshot_weights(loader.engine)
    mine = {name for name, held in before.items() if after.get(name, held) != held}
    sent = [view for group in loader.groups for view in group.views]
    everyone = sorted({name for each in all_gather(mine) for name in each})
    return [describe_tensor(name, sent, loader) for name in everyone]


def describe_tensor(engine_name: str, sent: Sequence[TensorView], loader: EngineLoader) -> str:
    """Return an engine's name of a tensor with the checkpoint tensors that it is made of: SGLang fuses some."""
    known = [view.name for view in sent]
    parts = dict.fromkeys(part for each in loader.coverage for part in each.filled.get(engine_name, ()))
    engine_name = engine_name.removeprefix(f"{TARGET}.")
    module, _, attribute = engine_name.rpartition(".")  # a derived tensor is derived from a weight of its module
    derived_from = f"{module}.{DERIVED.get(attribute, '')}"
    names = list(parts) or [name for name in known if name.startswith(derived_from)]
    if engine_name in known or not names:
        return engine_name
    more = [f"{len(names) - 4} more"] if len(names) > 4 else []
    return f"{engine_name} ({', '.join([*names[:4], *more])})"
