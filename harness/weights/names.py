"""Live parameter names -> checkpoint names: what `save_pretrained` would write, as views of the live tensors.

transformers 5 holds experts fused (`experts.gate_up_proj`) and writes them one by one (`experts.0.gate_proj.weight`). SGLang
knows the names on disk and silently ignores all others. transformers undoes its own fusing, here once, on meta tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch


class NotAViewError(ValueError):
    """The checkpoint form of a live tensor is no view of it, so it cannot be sent without a conversion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointTensor:
    """One tensor as the checkpoint names it: a strided view of one live tensor."""

    name: str
    live_name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """In elements, from the first of the live tensor."""
    dtype: torch.dtype
    """As it is sent: the live tensor may be wider."""

    def view(self, live: torch.Tensor) -> torch.Tensor:
        """Return the checkpoint tensor inside the full, contiguous live tensor in `dtype`, without a copy."""
        return torch.as_strided(live, self.shape, self.stride, live.storage_offset() + self.offset)


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements lie from the first of a strided view to its last, both counted."""
    return sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1


def checkpoint_layout(
    model: Any, live: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> tuple[CheckpointTensor, ...]:
    """Return what a checkpoint of `model` holds, in the order of the live tensors, by name within one of them.

    live: full shapes and dtypes by live name; the values are not read. dtype: what the checkpoint has the parameters in,
    which live may hold wider; None: as live has them. Buffers keep theirs. Raise NotAViewError for an architecture whose
    checkpoint form needs a transpose or a merge.
    """
    meta = {}
    for name, each in live.items():
        is_weight = isinstance(each, torch.nn.Parameter) and each.is_floating_point()
        meta[name] = torch.empty(each.shape, dtype=dtype if dtype and is_weight else each.dtype, device="meta")
    owner_of = {each.untyped_storage()._cdata: name for name, each in meta.items()}
    saved_as = meta
    if find_spec("transformers.core_model_loading") is not None:  # transformers 4 fuses nothing
        from transformers.core_model_loading import revert_weight_conversion

        saved_as = revert_weight_conversion(model, dict(meta))
    layout: dict[str, list[CheckpointTensor]] = {name: [] for name in live}
    for name, saved in sorted(saved_as.items()):
        owner = owner_of.get(saved.untyped_storage()._cdata)
        if owner is None:
            raise NotAViewError(
                f"{name} of {type(model).__name__} must be a view of one live parameter, got a conversion;"
                " use an architecture whose checkpoint only splits or renames parameters."
            )
        shape, stride, offset = tuple(saved.shape), tuple(saved.stride()), int(saved.storage_offset())
        layout[owner].append(
            CheckpointTensor(name=name, live_name=owner, shape=shape, stride=stride, offset=offset, dtype=saved.dtype)
        )
    return tuple(tensor for tensors in layout.values() for tensor in tensors)
