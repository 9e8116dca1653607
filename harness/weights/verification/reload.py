"""Compare what a copy does not show: what the engine's loader computes with the tensors that are sent, or derives from
them.

A right load, done once more, changes nothing. So each scheduler runs its own loader again on the trainer's tensors,
compares what that writes with what it held before, and takes it back (traced/undo.py).
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from harness.cluster.world import all_gather
from harness.weights.loader import EngineLoader
from harness.weights.trainer_weights import TrainerWeights
from harness.weights.verification.snapshot import describe_tensor
from harness.weights.worker import compare_tensors
from harness.weights.worker.compare_tensors import Reload, Reloaded


@dataclass(kw_only=True, slots=True)
class ReloadFindings:
    """What loading again showed; the same on every rank."""

    wrong: list[str] = field(default_factory=list)
    """One sentence for each of the engine's tensors that is not what its loader makes of the trainer's tensors."""
    derived: int = 0
    """The engine's tensors, of rank 0's scheduler, that it derives from others and that were compared."""
    not_covered: list[str] = field(default_factory=list)
    """One sentence for each of what could not be compared."""


@torch.no_grad()
def load_again(weights: TrainerWeights, loader: EngineLoader, names: Collection[str]) -> ReloadFindings:
    """Load the trainer's tensors of these names again, and what the loader computes with or derives, and compare.

    A collective call of all ranks; the names must be the same on each. It needs an engine that can be asked. For a
    model whose loader only copies, and no names, it does nothing.
    """
    loader.trace_once()
    together = {name for each in all_gather(sorted(loader.derived_over)) for name in each}
    alone = ({name for each in all_gather(sorted(loader.computing)) for name in each} | set(names)) - together
    findings, derives = ReloadFindings(), any(all_gather(loader.derives))
    if not alone and not derives:
        return findings  # an update session would cost the engine a pause
    with loader.engine.weight_update():
        for bucket in weights.buckets_of(alone):
            one = (weights.gather_buffer(bucket), bucket.views)
            _add(findings, loader, [view.name for view in bucket.views], Reload(sent=(one,)))
        if derives:
            buckets = weights.buckets_of(together)
            sent = tuple((weights.gather_buffer(bucket), bucket.views) for bucket in buckets)
            sent_names = [view.name for bucket in buckets for view in bucket.views]
            findings.derived = _add(findings, loader, sent_names, Reload(sent=sent, derive=True))
    return findings


def _add(findings: ReloadFindings, loader: EngineLoader, names: list[str], reload: Reload) -> int:
    """Have all schedulers do one reload; return how many tensors rank 0's compared."""
    everyone: list[Reloaded] = all_gather(loader.engine.ask(compare_tensors.load_again, reload))
    what = ", ".join([*names[:4], *([f"{len(names) - 4} more"] if len(names) > 4 else [])]) or "what is derived"
    errors = dict.fromkeys(each.error for each in everyone if each.error)
    findings.not_covered += [f"{what}: loading again raised {error}" for error in errors]
    if not errors and not any(each.compared for each in everyone):
        findings.not_covered.append(f"{what}: loading again writes nothing that can be seen")
    sent = [view for group in loader.groups for view in group.views]
    places: dict[str, list[str]] = {}
    for rank, each in enumerate(everyone):
        for name, (count, size) in each.differences.items():
            places.setdefault(name, []).append(f"{count} of {size} elements on rank {rank}")
    findings.wrong += [
        f"{describe_tensor(name, sent, loader)}, which the engine computes as it loads: {', '.join(where[:4])}"
        + " ..." * (len(where) > 4)
        for name, where in places.items()
    ]
    return everyone[0].compared
