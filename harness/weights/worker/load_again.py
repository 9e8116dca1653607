"""Load what was sent once more in a scheduler, to compare what no copy shows, and take it back.

That is what the loader computes with tensors that it is given, or derives from others.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from harness.weights.tensor_view import TensorView
from harness.weights.traced.loader_trace import in_this_thread
from harness.weights.traced.rank_trace import LoaderTrace
from harness.weights.traced.undo import UndoneWrites
from harness.weights.worker.kept_trace import kept_trace

Differences = dict[str, tuple[int, int]]
"""Name of a tensor -> (elements that differ in any bit, elements of all that was compared)."""
Sent = tuple[torch.Tensor, tuple[TensorView, ...]]
"""The buffer of a gathered bucket, and the checkpoint tensors in it."""


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
    """Load what was sent once more, compare all that this writes with what the model held before, and take it back."""
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
