"""Fusing groups: checkpoint tensors that SGLang fuses when it loads them, so that one call must bring them together."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from harness.weights.tensor_view import TensorView, span


@dataclass(frozen=True, kw_only=True, slots=True)
class FusingGroup:
    """Tensors that one call of the engine's loader must bring together."""

    views: tuple[TensorView, ...]
    """The checkpoint tensors. Together they hold every element of the tensors that they are views of once."""

    @property
    def by_tensor(self) -> dict[str, tuple[TensorView, ...]]:
        """The views of each tensor that is sent for this group, by its name."""
        found: dict[str, list[TensorView]] = {}
        for view in self.views:
            found.setdefault(view.of, []).append(view)
        return {of: tuple(views) for of, views in found.items()}

    def empty_tensors(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Return uninitialized memory for each tensor that is sent for this group, flat, in the dtype in which it is
        sent.
        """
        tensors = {}
        for of, views in self.by_tensor.items():
            # The views may be some of a tensor's: then there is memory for what lies before them too.
            numel = max(view.offset + span(view.shape, view.stride) if view.numel else 0 for view in views)
            # At least one element each: empty tensors would share one address, by which a trace tells them apart.
            tensors[of] = torch.empty(max(1, numel), dtype=views[0].dtype, device=device)[:numel]
        return tensors


def fusing_groups(layout: Iterable[TensorView]) -> tuple[FusingGroup, ...]:
    """Return the groups, in the order of the layout."""
    members: dict[str, list[TensorView]] = {}
    for view in layout:
        members.setdefault(fusing_key(view), []).append(view)
    return tuple(FusingGroup(views=tuple(views)) for views in members.values())


def fusing_key(view: TensorView) -> str:
    """Return a name that tensors share if the engine may fuse them.

    It is the module above the one that owns the tensor: SGLang fuses q_a_proj and kv_a_proj_with_mqa of one self_attn.
    Experts fuse only within themselves, so there it is the tensor of all experts, or the one expert.
    """
    if ".experts." in view.of:
        # A trainer that does not fuse has experts.3.gate_proj.weight: the expert, experts.3, is the group.
        path, _, rest = view.of.partition(".experts.")
        return f"{path}.experts.{rest.split('.')[0]}"
    return view.of.rsplit(".", 2)[0]
