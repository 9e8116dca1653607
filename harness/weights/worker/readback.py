"""What a scheduler compares with tensors that the trainer hands to it, and what it says of the tensors it holds."""

from typing import Any

import torch

from harness.weights.tensor_view import TensorView
from harness.weights.worker.coverage import kept_trace
from harness.weights.worker.model_state import (
    INTEGER,
    derived_tensors,
    synced_tensors,
    weighted_sum,
)

Differences = dict[str, tuple[int, int]]
"""Checkpoint name -> (elements that differ in any bit, elements of all copies that differ)."""


@torch.no_grad()
def compare(model: Any, sent: tuple[torch.Tensor, tuple[TensorView, ...]]) -> Differences:
    """Compare what the model holds with a gathered bucket, in the engine's own dtypes.

    sent: the bucket's buffer, and the checkpoint tensors in it. Each copy of the traced loader reads the buffer where it
    would read the trainer's tensor.
    """
    buffer, views = sent
    in_buffer = {view.name: view for view in views}
    kept = kept_trace(model)
    kept.refresh()
    in_trainer = {view.name: view for group in kept.groups for view in group.views if view.name in in_buffer}
    wrong: Differences = {}
    for copy in kept.copies():
        name = copy.source.name
        if name not in in_buffer:
            continue
        moved = in_buffer[name].offset - in_trainer[name].offset
        expected = (
            copy.source.at(copy.source.offset + moved).in_memory(buffer).to(copy.target.device, copy.target.dtype)
        )
        integer = INTEGER[expected.element_size()]
        differing = int((expected.view(integer) != copy.target.view(integer)).sum())
        if differing:
            before = wrong.get(name, (0, 0))
            wrong[name] = before[0] + differing, before[1] + copy.target.numel()
    return wrong


@torch.no_grad()
def stale_tensors(model: Any, _: None = None) -> list[str]:
    """Have the loader derive anew what it derives from weights; return the tensors that were not up to date."""
    kept = kept_trace(model)
    before = {name: tensor.clone() for name, tensor in derived_tensors(model).items()}
    for group, traced in zip(kept.groups, kept.traces, strict=True):
        if traced.does_more:
            kept.trace_group(group)
    if kept.derives:
        model.post_load_weights()
    after = derived_tensors(model)
    return [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]


@torch.no_grad()
def held_tensors(model: Any, _: None = None) -> dict[str, int]:
    """Return fingerprints of parameters, buffers and tensors derived from them, by the engine's own (fused, sharded) names."""
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    tensors = (named | dict(synced_tensors(model))).items()
    return {name: int(weighted_sum(tensor.contiguous().reshape(-1), (1,), 0)) for name, tensor in tensors}
