"""Compare every element that the engine holds with the trainer's, bit for bit.

Whichever transport brought the weights, each trainer rank gathers them bucket by bucket and hands each bucket to the
scheduler next to it (CUDA IPC, or shared memory). The scheduler compares it with what its loader, as traced, fills from
there.
"""

from dataclasses import dataclass
from typing import Any

import torch

from harness.cluster.world import all_gather
from harness.weights.loader import EngineLoader
from harness.weights.traced.model_state import INTEGER
from harness.weights.trainer_weights import TrainerWeights
from harness.weights.verification.comparison import in_role, load_again
from harness.weights.worker.kept_trace import kept_trace
from harness.weights.worker.load_again import Differences, Sent


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadBack:
    """What reading back showed; the same on every rank."""

    differences: list[str]
    """One sentence for each checkpoint tensor that an engine does not hold as the trainer does, and for each tensor of
    an engine that is not what its loader computes of the trainer's (reload.py)."""
    not_covered: list[str]
    """One sentence for each of what could not be compared."""


@torch.no_grad()
def read_back(weights: TrainerWeights, loader: EngineLoader) -> ReadBack:
    """Compare all that the engines hold with the trainer's weights. A collective call of all ranks; needs can_ask."""
    loader.trace_once()
    wrong: Differences = {}
    with loader.engine.weight_update():
        for bucket in weights.buckets:
            wrong |= loader.engine.ask(compare, (weights.gather_buffer(bucket), bucket.views))
    # A sync that checks nothing has not made sure that every name is read.
    read = {copy.source.name for each in loader.coverage for copies in each.copies for copy in copies}
    never = {view.name for view in weights.layout} - read - loader.opaque
    found: dict[str, list[str]] = {
        view.name: ["the engine holds nothing of it"] for view in weights.layout if view.name in never
    }
    for rank, differing in enumerate(all_gather(wrong)):
        for name, (count, size) in differing.items():
            found.setdefault(name, []).append(f"{count} of {size} elements on rank {rank}")
    again, of_draft = load_again(weights, loader, ()), loader.of_draft
    differences = [
        *(
            f"{in_role(name, of_draft)}: {', '.join(places[:4])}{' ...' if len(places) > 4 else ''}"
            for name, places in found.items()
        ),
        *again.wrong,
    ]
    return ReadBack(differences=differences, not_covered=again.not_covered)


@torch.no_grad()
def compare(model: Any, sent: Sent) -> Differences:
    """Compare what the model holds with a gathered bucket, in the engine's own dtypes, by checkpoint name.

    Each copy of the traced loader reads the buffer where it would read the trainer's tensor.
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
    for group, padding in zip(kept.groups, kept.padding, strict=True):
        if in_buffer.keys().isdisjoint(view.name for view in group.views):
            continue
        for zeros in padding:
            if differing := int((zeros != 0).sum()):
                wrong[f"the padding of {kept.name_of(zeros)}"] = differing, zeros.numel()
    return wrong
