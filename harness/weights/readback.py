"""Compare every element that the engine holds with the trainer's, bit for bit.

The schedulers copy what they hold backwards, to the place where each element stood when it was sent. The trainer gathers
its tensors by another way than the sync does (DTensor.full_tensor), in the dtype that was sent, and compares.
"""

from collections.abc import Iterable

import torch

from harness.cluster.world import World, all_gather
from harness.weights.gather import full_tensor
from harness.weights.names import CheckpointTensor
from harness.weights.stream.slots import Region
from harness.weights.stream.weight_link import WeightLink
from harness.weights.sync import WeightSync
from harness.weights.worker.model_state import INTEGER


@torch.no_grad()
def differences(sync: WeightSync, world: World) -> list[str]:
    """Return one sentence for each checkpoint tensor that an engine does not hold as the trainer does.

    And one for each tensor that an engine derives from weights and has not derived anew. A collective call of all ranks;
    the same answer on every rank. Needs custom weight loaders (sglang 0.4.8).
    """
    link = sync.link()
    by_name = {tensor.name: tensor for tensor in sync.layout}
    wrong: dict[str, tuple[int, int]] = {}
    mine = link.coverage[sync.engine.group.ranks.index(world.rank)]

    def compare(index: int, received: torch.Tensor) -> None:
        expected = link.link.slots[0]
        expected.zero_()
        places = {entry.name: entry for entry in sync.buckets[index].entries}
        by_live_name: dict[str, list[CheckpointTensor]] = {}
        for name in places:
            by_live_name.setdefault(by_name[name].live_name, []).append(by_name[name])
        for live_name, tensors in by_live_name.items():
            whole = full_tensor(sync.live[live_name], tensors[0].dtype)
            for tensor in tensors:
                places[tensor.name].view(expected).copy_(tensor.view(whole))
        for region in mine.regions[index]:
            count = _differing(region, expected, received)
            for name in region.names if count else ():
                before = wrong.get(name, (0, 0))
                wrong[name] = before[0] + count, before[1] + torch.Size(region.shape).numel()

    stale = link.read_back(compare)
    found: dict[str, list[str]] = {name: ["the engine holds nothing of it"] for name in _never_read(link, by_name)}
    for rank, (names, derived) in enumerate(all_gather((wrong, stale))):
        for name, (count, size) in names.items():
            found.setdefault(name, []).append(f"{count} of {size} elements on rank {rank}")
        for name in derived:
            found.setdefault(f"{name} (derived by the engine)", []).append(f"stale on rank {rank}")
    return [f"{name}: {', '.join(places[:4])}{' ...' if len(places) > 4 else ''}" for name, places in found.items()]


def _never_read(link: WeightLink, names: Iterable[str]) -> list[str]:
    """Return the names that no scheduler reads an element of; a sync without verification has not checked that."""
    read = {name for each in link.coverage for regions in each.regions for region in regions for name in region.names}
    return [name for name in names if name not in {*read, *unreadable(link)}]


def unreadable(link: WeightLink) -> list[str]:
    """Return the names that arrive in a way that cannot be followed, which `differences` does not cover."""
    return sorted({name for each in link.coverage for name in each.opaque})


def _differing(region: Region, expected: torch.Tensor, received: torch.Tensor) -> int:
    """Return how many elements of the region differ in any bit, both as the engine's dtype holds them."""
    values = [region.view(slot).to(region.target_dtype).contiguous() for slot in (expected, received)]
    one, other = (value.view(INTEGER[value.element_size()]) for value in values)
    return int((one != other).sum())
