"""The trace of a scheduler's loader, kept in the scheduler: what it says of the weights that the scheduler holds.

A trainer rank asks the scheduler next to it for these functions (rollout/schedulers.py). The trace is kept on the
model, because nothing else of ours lives as long as the scheduler does.

Before a sync, `poison` overwrites what it is to fill: whatever it does not bring then shows, whether the trainer moved
or not. The trace says what that is: what the loader copies, makes zero, computes, and what it derives from all that.
Nothing else is touched, because no sync would mend it. After it, `fingerprints` say what each copy filled, and
`unwritten` how much of it still holds the poison.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from harness.weights.fusing import FusingGroup
from harness.weights.tensor_view import loses_precision
from harness.weights.traced.coverage import LoadCoverage
from harness.weights.traced.model_state import (
    SCALES_OF_KV_CACHE,
    Powers,
    derived_tensors,
    fingerprint,
    synced_tensors,
    weighted_sum,
)
from harness.weights.traced.rank_trace import LoaderTrace
from harness.weights.traced.undo import storage

_KEPT = "_harness_trace"
PADDING = "padding"
BYTE = 0x20
"""Added to a number below 16 this is finite and not zero in every 8-bit float of torch."""
VALUES = 16


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


@dataclass(frozen=True, slots=True)
class Poisoned:
    """What a scheduler has overwritten before a sync."""

    tensors: int
    """The engine's tensors, or parts of them, that now hold the poison."""
    left: tuple[str, ...]
    """Those that have to stay as they are."""


@torch.no_grad()
def poison(model: Any, number: int) -> Poisoned:
    """Fill everything that the traced loader fills with one value.

    number: of the sync. Two that follow each other poison with different values. They are finite, because a NaN in the
    logits would kill the sampler before anything is compared. Integers wider than a byte stay: one of them may be an
    index.
    """
    kept, left = kept_trace(model), list[str]()
    kept.refresh()
    filled = kept.filled_tensors()
    for name, tensor in filled:
        if _is_poisoned_by_value(tensor):
            tensor.fill_(poison_value(number))
        elif tensor.itemsize == 1 and tensor.dtype != torch.bool:
            tensor.view(torch.uint8).fill_(BYTE + number % VALUES)
        else:
            left.append(name)
    return Poisoned(len(filled) - len(left), tuple(left))


def poison_value(number: int) -> float:
    """Return what sync `number` poisons with: exact in bfloat16 and float16, and no value that a model begins with."""
    return 0.2578125 + number % VALUES / 64


def _is_poisoned_by_value(tensor: torch.Tensor) -> bool:
    """Return whether no weight is likely to be the poison: in 8 bits it is an ordinary value."""
    return tensor.is_floating_point() and tensor.itemsize > 1


@torch.no_grad()
def unwritten(model: Any, number: int) -> dict[str, tuple[int, int]]:
    """Return checkpoint name -> (elements of its copies that still hold the poison of sync `number`, all of them).

    Names whose copies are of 8 bits are left out.
    """
    still, sizes = Counter[str](), Counter[str]()
    for copy in kept_trace(model).copies():
        if _is_poisoned_by_value(copy.target):
            still[copy.source.name] += int((copy.target == poison_value(number)).sum())
            sizes[copy.source.name] += copy.target.numel()
    return {name: (still[name], size) for name, size in sizes.items()}


@dataclass(frozen=True, slots=True)
class OwnLoad:
    """What a scheduler holds, by the engine's own (fused, sharded) names."""

    sums: dict[str, int]
    """Fingerprints of parameters, buffers and tensors derived from them."""
    rounded: tuple[str, ...] = ()
    """Those taken in a narrower dtype than the engine's, because a sync brings them in it."""
    left: tuple[str, ...] = ()
    """Those that the loader computes of what a sync sends in a narrower dtype: they cannot be the same."""


@torch.no_grad()
def fingerprint_everything(model: Any, _: None = None) -> OwnLoad:
    """Return fingerprints of all that this scheduler holds, each in the dtype in which a sync brings it.

    Where the loader was never traced, that dtype is not known: in its own.
    """
    traces = kept.traces if (kept := getattr(model, _KEPT, None)) else []
    narrower = {
        storage(copy.target): copy.source.dtype
        for traced in traces
        for copy in traced.copies
        if loses_precision(copy.target.dtype, copy.source.dtype)
    }
    computed = {
        storage(part)
        for traced in traces
        for part in traced.computed
        if any(
            view.dtype.itemsize > 1 and loses_precision(part.dtype, view.dtype)
            for view in traced.views
            if view.name in traced.opaque
        )
    }
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    tensors = named | dict(synced_tensors(model))
    left = tuple(name for name, each in tensors.items() if storage(each) in computed)
    rounded = tuple(name for name, each in tensors.items() if storage(each) in narrower)
    values = {
        name: each.to(narrower.get(storage(each), each.dtype)) for name, each in tensors.items() if name not in left
    }
    sums = {name: int(weighted_sum(each.contiguous().reshape(-1), (1,), 0)) for name, each in values.items()}
    return OwnLoad(sums, rounded, left)
