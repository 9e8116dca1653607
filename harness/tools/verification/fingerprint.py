"""Compare 64-bit fingerprints of every element that the engine holds with the trainer's, without moving any.

Each scheduler sums up what it holds, each trainer rank its shards (worker/model_state.py says how). That costs one read of
the weights; it names the tensors in which something differs, and readback.py, which moves every element, says how much.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from harness.cluster.world import all_gather
from harness.weights.gather import Chunks
from harness.weights.groups import LiveSpan
from harness.weights.sync import WeightSync
from harness.weights.worker import puller
from harness.weights.worker.model_state import WRAP, weighted_sum

Box = tuple[str, int, tuple[tuple[int, int], ...]]
"""What a copy reads: name, offset and steps; equal for ranks that hold the same elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FingerprintComparison:
    """The outcome of one comparison; the same on every rank."""

    tensors: int
    compared: int
    """Those whose every element is known to equal the trainer's; the others arrive in ways that cannot be followed."""
    wrong: tuple[str, ...]
    """Names of tensors, or of such as fuse with them, that the engine does not hold as the trainer does."""


def compare_fingerprints(sync: WeightSync) -> FingerprintComparison:
    """Compare, after a push that traced the schedulers' loaders. A collective call of all ranks.

    Raise RuntimeError where the schedulers cannot report what they hold.
    """
    expected, received = _trainer_sums(sync), _engine_sums(sync)
    compared, mine = 0, []
    for number, names, boxes in _followed(sync):
        compared += len(names)
        total = 0
        for box, copies in boxes.items():
            found = {received[rank][part] for rank, part in copies}
            total += min(found)
            mine += [box[0]] * (len(found) > 1)
        mine += names if total % WRAP != expected[number] else []
    wrong = tuple(dict.fromkeys(name for each in all_gather(mine) for name in each))
    return FingerprintComparison(tensors=len(sync.layout), compared=compared, wrong=wrong)


@torch.no_grad()
def _trainer_sums(sync: WeightSync) -> list[int]:
    """Return what the shards of all ranks add up to, for each group, in the dtype in which they are sent."""
    sums = [
        sum(
            (_sum_of(span, sync.live[span.live_name].detach()) for span in group.spans),
            torch.zeros((), dtype=torch.int64),
        )
        for group in sync.link.groups
    ]
    return [sum(each) % WRAP for each in zip(*all_gather(torch.stack(sums).tolist()), strict=True)]


def _sum_of(span: LiveSpan, tensor: torch.Tensor) -> torch.Tensor:
    """Sum this rank's rows of a live tensor; of one that is not sharded, on rank 0 alone."""
    first = span.offset // span.dtype.itemsize
    if isinstance(tensor, DTensor):
        chunks = Chunks.of(tensor, span.dtype)
        first += tensor.device_mesh.get_local_rank() * chunks.rows * chunks.row_elements
        tensor = tensor.to_local()
    elif dist.get_rank() != 0:
        tensor = tensor.reshape(-1)[:0]
    return weighted_sum(tensor.to(span.dtype).reshape(-1), (1,), first)


def _engine_sums(sync: WeightSync) -> dict[int, dict[str, int]]:
    """Return engine rank -> "<group>/<copy>" -> sum, of all schedulers of this rank's engine."""
    for attempt in range(2):
        if attempt:
            sync.link.trace()  # SGLang has put other tensors in the place of those that were traced
        with sync.engine.weight_update():
            mine = sync.engine.ask(puller.fingerprints)
        by_rank = sync.engine.group.all_gather(mine)
        found = {place: by_rank[rank] for place, rank in enumerate(sync.engine.group.ranks)}
        due = {each.rank: sum(map(len, each.sources)) for each in sync.link.coverage}
        if {rank: len(sums) for rank, sums in found.items()} == due:
            return found
    raise RuntimeError(f"fingerprints must come from schedulers with {due} copies, got them from {found.keys()}")


def _followed(sync: WeightSync) -> Iterator[tuple[int, list[str], dict[Box, list[tuple[int, str]]]]]:
    """Yield each group whose every element is held once, as wide as it was sent: its names, box -> (rank, copy) of each."""
    lost = {name for each in sync.link.coverage for name in each.opaque}
    for number, group in enumerate(sync.link.groups):
        boxes: dict[Box, list[tuple[int, str]]] = {}
        for each in sync.link.coverage:
            for part, source in enumerate(each.sources[number]):
                boxes.setdefault((source.name, source.offset, source.steps), []).append((each.rank, f"{number}/{part}"))
                if torch.promote_types(source.dtype, source.target_dtype) != source.target_dtype:
                    lost.add(source.name)
        names = [entry.name for entry in group.entries]
        read = sum(prod(size for _, size in steps) for _, _, steps in boxes)
        if lost.isdisjoint(names) and read == sum(entry.numel for entry in group.entries):
            yield number, names, boxes
