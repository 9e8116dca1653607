"""Checks before anything is sent: the trainer's shards, and what the engine's own loader would do with each tensor.

Each scheduler names which elements of a layout it would copy to where (worker/loader_trace.py). A name that it does not
know, a shape that does not fit, a dtype that would be rounded, or an engine parameter that nothing fills is refused here,
while the engine still serves.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import gcd

import torch
from torch.distributed.tensor import DTensor

from harness.cluster.world import all_gather
from harness.weights.gather import Chunks
from harness.weights.names import CheckpointTensor
from harness.weights.stream.slots import Region, SlotEntry
from harness.weights.worker.reader import LoadCoverage

SHOWN = 8


class WeightsRefused(ValueError):
    """Weights that must not be sent; raised before the engine sees them."""


def check_shards(live: Mapping[str, torch.Tensor]) -> None:
    """Raise WeightsRefused, on every rank, where a shard is missing or ranks differ in a name, shape or dtype.

    A collective call of all ranks.
    """
    mine = {name: (tuple(tensor.shape), str(tensor.dtype), _missing_rows(tensor)) for name, tensor in live.items()}
    everyone = all_gather(mine)
    for name in dict.fromkeys(name for each in everyone for name in each):
        seen = [each.get(name) for each in everyone]
        for rank, one in enumerate(seen):
            if one is None:
                raise WeightsRefused(f"{name}: rank {rank} has none, but every rank must hold its shard.")
            if one[:2] != seen[0][:2]:
                raise WeightsRefused(f"{name}: {one[:2]} on rank {rank} but {seen[0][:2]} on rank 0.")
            if one[2]:
                raise WeightsRefused(f"{name}: rank {rank} {one[2]}")


def _missing_rows(tensor: torch.Tensor) -> str:
    """Return what this rank lacks, "" where it holds its part."""
    if tensor.device.type == "meta":
        return "has it on the meta device, without values"
    if not isinstance(tensor, DTensor):
        return ""
    chunks = Chunks.of(tensor, tensor.dtype)
    first = min(tensor.device_mesh.get_local_rank() * chunks.rows, tensor.shape[0])
    due, rows = min(chunks.rows, tensor.shape[0] - first), tensor.to_local().shape[0]
    return "" if rows == due else f"holds {rows} of the {due} rows of its shard"


def check_complete(layout: Iterable[CheckpointTensor], live: Mapping[str, torch.Tensor]) -> None:
    """Raise WeightsRefused where the checkpoint's tensors are not all elements of a live one."""
    sent = dict.fromkeys(live, 0)
    for part in layout:
        sent[part.live_name] += torch.Size(part.shape).numel()
    for name, tensor in live.items():
        if sent[name] != tensor.numel():
            raise WeightsRefused(f"{name}: the checkpoint's tensors hold {sent[name]} of its {tensor.numel()} elements")


def check_finite(live: Mapping[str, torch.Tensor]) -> None:
    """Raise WeightsRefused, on every rank, naming tensors with a NaN or an infinity. A collective call of all ranks."""
    local = {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in live.items()}
    # Zero times a finite number is zero; the sum carries any NaN on, without a temporary as large as the tensor.
    sums = {
        name: tensor.detach().mul(0).sum(dtype=torch.float32)
        for name, tensor in local.items()
        if tensor.is_floating_point()
    }
    wrong = [name for name, bad in zip(sums, torch.stack(list(sums.values())).isnan().tolist(), strict=True) if bad]
    found = {name: rank for rank, names in reversed(list(enumerate(all_gather(wrong)))) for name in names}
    if found:
        listed = ", ".join(f"{name} (rank {rank})" for name, rank in list(found.items())[:SHOWN])
        raise WeightsRefused(f"{len(found)} tensor(s) hold a NaN or an infinity: {listed}; nothing was sent.")


def check_coverage(buckets: Sequence[Sequence[SlotEntry]], coverage: Sequence[LoadCoverage]) -> None:
    """Raise WeightsRefused, naming tensors, unless the schedulers of one engine together take every element."""
    found = coverage_problems(buckets, coverage)
    if found:
        more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        raise WeightsRefused("; ".join([*found[:SHOWN], *more]))


def coverage_problems(buckets: Sequence[Sequence[SlotEntry]], coverage: Sequence[LoadCoverage]) -> list[str]:
    """Return one sentence for each tensor that would not arrive whole and as it is."""
    found = [
        f"{name}: the engine's loader refuses it: {error}" for each in coverage for name, error in each.errors.items()
    ]
    # One rank alone may have nothing of a tensor: where sizes are padded, the last ranks hold padding only.
    unknown = [name for name in coverage[0].unknown if all(name in each.unknown for each in coverage)]
    found += [f"{name}: the engine knows no such parameter and would ignore it" for name in unknown]
    filled = {name for each in coverage for name in each.filled}
    unfilled = [name for each in coverage for name in each.unfilled if name not in filled]
    found += [f"{name}: a parameter of the engine that nothing sent would fill" for name in unfilled]
    named = {*unknown, *(name for each in coverage for name in each.opaque)}
    named |= {name for each in coverage for key in each.errors for name in key.split(", ")}
    for index, bucket in enumerate(buckets):
        regions = [region for each in coverage for region in each.regions[index]]
        for entry in bucket:
            if entry.name not in named:
                found += _misfit(entry, [region for region in regions if entry.name in region.names])
    return list(dict.fromkeys(found))


def _misfit(entry: SlotEntry, regions: Sequence[Region]) -> list[str]:
    sentences = []
    narrowed = sorted({_short(each.target_dtype) for each in regions if _loses(each.dtype, each.target_dtype)})
    if narrowed:
        sentences.append(
            f"{entry.name}: sent as {_short(entry.dtype)}, but the engine holds {', '.join(narrowed)}:"
            f" it would be rounded; send {narrowed[0]}"
        )
    if any(region.index is not None for region in regions):
        return sentences  # elements that do not lie in strides are compared when they are read back
    # Ranks that hold the same rows (replicated heads) read the same region; others share a tensor without overlap.
    read = _count_elements(regions)
    if read < entry.numel:
        sentences.append(
            f"{entry.name}: of its {entry.numel} elements ({list(entry.shape)}) the engine would read {read};"
            " its shape is not the engine's"
        )
    return sentences


def _count_elements(regions: Sequence[Region]) -> int:
    """Return how many different elements the regions read together."""
    boxes = {(region.offset, region.steps) for region in regions if 0 not in region.shape}
    if not boxes:
        return 0
    first = min(offset for offset, _ in boxes)
    # Counted in runs of elements that all regions take together, so that a large tensor needs few marks.
    runs = [pairs[0][1] if pairs and pairs[0][0] == 1 else 1 for _, pairs in boxes]
    unit = gcd(*runs, *(at - first for at, _ in boxes), *(step for _, pairs in boxes for step, _ in pairs if step > 1))
    marks = []
    for offset, pairs in boxes:
        at = torch.tensor([(offset - first) // unit])
        for stride, size in pairs:
            steps = torch.arange(size // unit) if stride == 1 else torch.arange(size) * (stride // unit)
            at = (at.unsqueeze(-1) + steps).flatten()
        marks.append(at)
    return int(torch.cat(marks).unique().numel()) * unit


def _loses(sent: torch.dtype, target: torch.dtype) -> bool:
    """Return whether a value of dtype `sent` may not fit into `target`."""
    return torch.promote_types(sent, target) != target


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
