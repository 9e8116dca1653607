"""What the tools here ask SGLang's scheduler processes for (VerlEngine.ask)."""

from typing import Any

import torch

from harness.weights.worker.model_state import INTEGER, derived_tensors, synced_tensors, weighted_sum
from harness.weights.worker.puller import Puller, copies_of, kept

Differences = tuple[dict[str, tuple[int, int]], list[str]]
"""Checkpoint name -> (elements that differ in any bit, all of its copies); names of derived tensors that were stale."""


@torch.no_grad()
def compare(model: Any, batch: int) -> Differences:
    """Compare what the model holds of one batch of a pull, in its own dtype, with the trainers' shards, read by a plan made anew.

    Derived tensors are derived anew.
    """
    puller = kept(model)
    wrong: dict[str, tuple[int, int]] = {}
    derived = {name: tensor.clone() for name, tensor in derived_tensors(model).items()}
    each = puller.deliveries.batches[batch]
    for number in range(each.start, each.stop):
        traced = puller.traces[number]
        for copy, expected in zip(traced.copies, _expected(puller, number), strict=True):
            integer = INTEGER[expected.element_size()]
            differing = int((expected.view(integer) != copy.target.view(integer)).sum())
            if differing:
                before = wrong.get(copy.source.name, (0, 0))
                wrong[copy.source.name] = before[0] + differing, before[1] + copy.target.numel()
        if traced.does_more:
            puller.trace_group(puller.groups[number])  # the loader derives anew
    if puller.derives and each is puller.deliveries.batches[-1]:
        model.post_load_weights()
    after = derived_tensors(model)
    return wrong, [name for name, tensor in derived.items() if not torch.equal(tensor, after[name])]


def _expected(puller: Puller, number: int) -> list[torch.Tensor]:
    """Return what the tensors of a group's copies should hold, in their dtypes."""
    copies = puller.traces[number].copies
    if number in puller.own:
        filled = puller.whole(number)
        return [copy.source.view(filled).to(copy.target.dtype) for copy in copies]
    # As far apart as in the target: a region's steps are the target's.
    found = [
        torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device=puller.device)
        for target in (copy.target for copy in copies)
    ]
    copies_of(list(puller.moves(number, found)), puller.device).run()
    return found


@torch.no_grad()
def held_tensors(model: Any, _: None = None) -> dict[str, int]:
    """Return fingerprints of parameters, buffers and what is derived from them, by the engine's own (fused, sharded) names."""
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    tensors = (named | dict(synced_tensors(model))).items()
    return {name: int(weighted_sum(tensor.contiguous().reshape(-1), (1,), 0)) for name, tensor in tensors}


def current_gpu_uuid(*_: object) -> str:
    """Return the UUID of the current CUDA device, as nvidia-smi names it without its GPU- prefix."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
