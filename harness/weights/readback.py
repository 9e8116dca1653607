"""Does the engine hold what the trainer holds? Every element is read back and compared, bit for bit.

The schedulers copy what they hold backwards, to the place where each element stood when it was sent. The trainer
gathers its tensors anew, by another way than the sync does (DTensor.full_tensor), in the dtype that was sent, and
compares.
"""

from collections.abc import Iterable, Mapping

import torch

from harness.cluster.world import World, all_gather
from harness.weights.gather import full_tensor
from harness.weights.names import CheckpointTensor
from harness.weights.stream.slots import typed
from harness.weights.stream.weight_link import WeightLink
from harness.weights.sync import WeightSync
from harness.weights.worker.reader import Region
from harness.weights.worker.scheduler_fingerprint import INTEGER


@torch.no_grad()
def differences(sync: WeightSync, world: World) -> list[str]:
    """One sentence for each checkpoint tensor that an engine does not hold as the trainer does, and for each tensor
    that an engine derives from weights and has not derived anew; none when all arrived.

    A collective call of all ranks; the same answer on every rank. Raises ValueError where this sglang has no door into
    its schedulers (before 0.4.8).
    """
    link = sync.link()
    by_name = {tensor.name: tensor for tensor in sync.layout}
    wrong: dict[str, tuple[int, int]] = {}
    mine = link.coverage[sync.engine.group.ranks.index(world.rank)]

    def compare(index: int, held: torch.Tensor) -> None:
        expected = link.link.slots[0]
        expected.zero_()
        for name, tensors in _by_live_name(by_name[entry.name] for entry in sync.buckets[index].entries).items():
            whole = full_tensor(sync.live[name], tensors[0].dtype)
            places = {entry.name: entry for entry in sync.buckets[index].entries}
            for tensor in tensors:
                places[tensor.name].view(expected).copy_(tensor.view(whole))
        for region in mine.regions[index]:
            count = _differing(region, expected, held)
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
    """Names that no scheduler reads an element of; a sync without verification never asked."""
    read = {name for arrival in link.coverage for regions in arrival.regions for each in regions for name in each.names}
    return [name for name in names if name not in {*read, *unreadable(link)}]


def unreadable(link: WeightLink) -> list[str]:
    """Names that arrive in a way that cannot be followed, so that `differences` does not cover them."""
    return sorted({name for arrival in link.coverage for name in arrival.opaque})


def _by_live_name(tensors: Iterable[CheckpointTensor]) -> Mapping[str, list[CheckpointTensor]]:
    grouped: dict[str, list[CheckpointTensor]] = {}
    for tensor in tensors:
        grouped.setdefault(tensor.live_name, []).append(tensor)
    return grouped


def _differing(region: Region, expected: torch.Tensor, held: torch.Tensor) -> int:
    """How many elements of the region differ in any bit, both as the engine's dtype holds them."""
    values = [_view(region, slot).to(region.target_dtype).contiguous() for slot in (expected, held)]
    one, other = (value.view(INTEGER[value.element_size()]) for value in values)
    return int((one != other).sum())


def _view(region: Region, slot: torch.Tensor) -> torch.Tensor:
    elements = typed(slot, region.dtype)
    if region.index is not None:
        return elements[region.index.to(slot.device)]
    return elements.as_strided(region.shape, region.stride, region.offset)
