"""What a scheduler compares with tensors that the trainer hands to it, and what it says of the tensors it holds."""

from dataclasses import dataclass, field
from typing import Any

import torch

from harness.weights.tensor_view import TensorView
from harness.weights.traced.loader_trace import in_this_thread
from harness.weights.traced.model_state import INTEGER, synced_tensors, weighted_sum
from harness.weights.traced.rank_trace import LoaderTrace
from harness.weights.traced.undo import UndoneWrites
from harness.weights.worker.kept_trace import kept_trace

Differences = dict[str, tuple[int, int]]
"""Name of a tensor -> (elements that differ in any bit, elements of all that was compared)."""
Sent = tuple[torch.Tensor, tuple[TensorView, ...]]
"""The buffer of a gathered bucket, and the checkpoint tensors in it."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Reload:
    """What a scheduler loads again, to compare: the next bucket, or the last step."""

    sent: tuple[Sent, ...] = ()
    derive: bool = False
    """Run post_load_weights after the tensors are loaded."""


@dataclass(kw_only=True, slots=True)
class Reloaded:
    """What a load of the same tensors would change in a scheduler: nothing, if they arrived."""

    differences: Differences = field(default_factory=dict)
    """By the engine's own names."""
    compared: int = 0
    """Tensors of the engine that the load wrote, and that were compared."""
    error: str = ""
    """What the loader raised; nothing was compared."""

    @property
    def elements(self) -> int:
        """How many elements differ in all."""
        return sum(count for count, _ in self.differences.values())


@torch.no_grad()
def load_again(model: Any, reload: Reload) -> Reloaded:
    """Load what was sent once more, compare all that this writes with what the model held before, and take it back.

    For what no copy shows: tensors that the loader computes with, and tensors that it derives from others.
    """
    kept = kept_trace(model)
    found = _load_again(kept, reload, kept.device)
    if found.elements and kept.device.type != "cpu":
        # A load from disk computes on the CPU, whose exp() may differ in the last bit. Either is right.
        found = min(
            found, _load_again(kept, reload, torch.device("cpu")), key=lambda each: (bool(each.error), each.elements)
        )
    found.differences = {name: (count, size) for name, (count, size) in found.differences.items() if count}
    return found


def _load_again(kept: LoaderTrace, reload: Reload, device: torch.device) -> Reloaded:
    with UndoneWrites(kept.model) as undone, in_this_thread():
        try:
            for buffer, views in reload.sent:
                # Some loaders compute in place, in what they are given.
                pairs = [(view.name, view.in_memory(buffer).to(device, copy=True).contiguous()) for view in views]
                with kept.post_load_noted():
                    kept.model.load_weights(pairs)
            if reload.derive and kept.derives:
                kept.model.post_load_weights()
        except Exception as error:  # whatever the loader of an architecture raises when it is asked twice
            return Reloaded(error=f"{type(error).__name__}: {error}".strip())
        changed = undone.changed()
    return Reloaded(differences=changed, compared=len(changed))


@torch.no_grad()
def held_tensors(model: Any, _: None = None) -> dict[str, int]:
    """Return fingerprints of parameters, buffers and tensors derived from them, by the engine's own (fused, sharded)
    names.
    """
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    tensors = (named | dict(synced_tensors(model))).items()
    return {name: int(weighted_sum(tensor.contiguous().reshape(-1), (1,), 0)) for name, tensor in tensors}
