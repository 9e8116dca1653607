"""The trace of a scheduler's loader, kept in the scheduler: what it says of the weights that the scheduler holds.

A trainer rank asks the scheduler next to it for these functions (rollout/schedulers.py). The trace is kept on the
model, because nothing else of ours lives as long as the scheduler does.
"""

from typing import Any

import torch

from harness.weights.fusing import FusingGroup
from harness.weights.traced.coverage import LoadCoverage
from harness.weights.traced.model_state import SCALES_OF_KV_CACHE, Powers, derived_tensors, fingerprint, weighted_sum
from harness.weights.traced.rank_trace import LoaderTrace
from harness.weights.traced.undo import storage

_KEPT = "_harness_trace"
PADDING = "padding"


def kept_trace(model: Any) -> LoaderTrace:
    """Return the trace of the scheduler whose model this is, as `trace_of` made it."""
    found = getattr(model, _KEPT, None)
    assert isinstance(found, LoaderTrace), "this scheduler has never traced its loader"
    return found


def trace_of(model: Any, groups: tuple[FusingGroup, ...]) -> LoaderTrace:
    """Return the kept trace if it is of these groups, traced again if SGLang has replaced a tensor; else trace now."""
    kept: LoaderTrace | None = getattr(model, _KEPT, None)
    if kept and kept.groups == groups:
        if not (kept.is_current and kept.knows_all_parameters):
            kept.run()
        return kept
    made = LoaderTrace(model, groups)
    made.run()
    setattr(model, _KEPT, made)
    return made


def cover(model: Any, groups: tuple[FusingGroup, ...]) -> LoadCoverage:
    """Return what this scheduler's loader does with each group of tensors."""
    return trace_of(model, groups).coverage()


@torch.no_grad()
def fingerprints(model: Any, _: None = None) -> dict[str, int]:
    """Return the fingerprint of what each copy filled as "<group>/<copy>" -> number; empty if SGLang replaced a tensor.

    Also "<group>/padding" -> elements that are not zero where the loader makes them zero.
    """
    kept: LoaderTrace | None = getattr(model, _KEPT, None)
    if not kept or not kept.is_current or not kept.knows_all_parameters:
        return {}
    sums: dict[str, torch.Tensor] = {}
    powers = Powers()
    for number, (traced, padding) in enumerate(zip(kept.traces, kept.padding, strict=True)):
        for part, copy in enumerate(traced.copies):
            sums[f"{number}/{part}"] = fingerprint(copy.target, copy.source, powers)
        if padding:
            sums[f"{number}/{PADDING}"] = torch.stack([(zeros != 0).sum() for zeros in padding]).sum()
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}


@torch.no_grad()
def other_tensors(model: Any, derived: bool) -> dict[str, int]:
    """Return a fingerprint of each buffer, and each scale of the KV cache, that no sync fills: name and form -> number.

    A rotary table, for example. The form is in the name, because SGLang makes some of them longer when it needs to.
    derived: also return those of the tensors that a loader derives, such as w_kc.
    """
    kept = kept_trace(model)
    filled = {storage(each) for _, each in kept.filled_tensors()}
    scales = {name: each for name, each in model.named_parameters() if name.endswith(SCALES_OF_KV_CACHE)}
    others = {
        name: each for name, each in (dict(model.named_buffers()) | scales).items() if storage(each) not in filled
    }
    if derived:
        others |= {name: each for name, each in derived_tensors(model).items() if name in kept.derived}
    powers = Powers()
    sums = [weighted_sum(each.contiguous().reshape(-1), (1,), 0, powers) for each in others.values()]
    names = [f"{name} ({each.dtype}, {list(each.shape)})" for name, each in others.items()]
    return dict(zip(names, torch.stack(sums).tolist(), strict=True)) if sums else {}
