"""Compare every element that the engine holds with the trainer's, bit for bit.

The trainer gathers its tensors by another way than the sync does (DTensor.full_tensor), in the dtype that was sent, and puts
them where they stood when they were sent. Each scheduler compares what it reads there with what it holds.
"""

import torch

from harness.cluster.world import all_gather
from harness.weights.gather import full_tensor
from harness.weights.stream.weight_link import WeightLink
from harness.weights.sync import WeightSync


@torch.no_grad()
def weight_differences(sync: WeightSync) -> list[str]:
    """Return one sentence for each checkpoint tensor that an engine does not hold as the trainer does.

    And one for each tensor that an engine derives from weights and has not derived anew. A collective call of all ranks;
    the same answer on every rank. Needs custom weight loaders (sglang 0.4.8).
    """
    link = sync.link()
    by_name = {tensor.name: tensor for tensor in sync.layout}

    def fill(index: int, slot: torch.Tensor) -> None:
        whole: dict[str, torch.Tensor] = {}
        for entry in sync.buckets[index].entries:
            tensor = by_name[entry.name]
            if tensor.live_name not in whole:
                whole = {tensor.live_name: full_tensor(sync.live[tensor.live_name], tensor.dtype)}
            entry.view(slot).copy_(tensor.view(whole[tensor.live_name]))

    mine = link.compare(fill)
    # A sync without verification has not checked that every name is read.
    read = {region.name for each in link.coverage for regions in each.regions for region in regions}
    never = by_name.keys() - read - set(unreadable(link))
    found: dict[str, list[str]] = {name: ["the engine holds nothing of it"] for name in by_name if name in never}
    for rank, (wrong, stale) in enumerate(all_gather(mine)):
        for name, (count, size) in wrong.items():
            found.setdefault(name, []).append(f"{count} of {size} elements on rank {rank}")
        for name in stale:
            found.setdefault(f"{name} (derived by the engine)", []).append(f"stale on rank {rank}")
    return [f"{name}: {', '.join(places[:4])}{' ...' if len(places) > 4 else ''}" for name, places in found.items()]


def unreadable(link: WeightLink) -> list[str]:
    """Return the names that arrive in a way that cannot be followed, which `weight_differences` does not cover."""
    return sorted({name for each in link.coverage for name in each.opaque})
