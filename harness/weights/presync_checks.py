"""Checks before anything is sent, while the engine still serves: the trainer's shards are there and finite, and the engine's
own loader would take each tensor whole (a dry run of it, worker/loader_trace.py, says what it would copy where).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

import torch
from torch.distributed.tensor import DTensor

from harness.cluster.world import all_gather
from harness.weights.gather import Chunks
from harness.weights.groups import FusingGroup, PlacedTensor, SourceView
from harness.weights.names import CheckpointTensor, span
from harness.weights.worker.puller import LoadCoverage

SHOWN = 8
"""How many tensors a message names."""


class WeightsRefused(ValueError):
    """Weights that must not be sent; raised before the engine sees them."""


def check_shards(live: Mapping[str, torch.Tensor]) -> None:
    """Raise WeightsRefused, on every rank, where a shard is missing or ranks differ in a name, shape or dtype. Collective."""
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
    sums = {}
    for name, tensor in live.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_floating_point():
            sums[name] = local.detach().mul(0).sum(dtype=torch.float32)  # zero, unless one is not finite
    wrong = list(compress(sums, torch.stack(list(sums.values())).isnan().tolist()))
    found = {name: rank for rank, names in reversed(list(enumerate(all_gather(wrong)))) for name in names}
    if found:
        listed = ", ".join(f"{name} (rank {rank})" for name, rank in list(found.items())[:SHOWN])
        raise WeightsRefused(f"{len(found)} tensor(s) hold a NaN or an infinity: {listed}; nothing was sent.")


def check_coverage(groups: Sequence[FusingGroup], coverage: Sequence[LoadCoverage]) -> None:
    """Raise WeightsRefused, naming tensors, unless the schedulers of one engine together take every element."""
    found = coverage_problems(groups, coverage)
    if found:
        raise WeightsRefused(first_of(found))


def first_of(names: Sequence[str]) -> str:
    """Return the first names and the number of the others, or "none found"."""
    more = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return "; ".join([*names[:SHOWN], *more]) or "none found"


def coverage_problems(groups: Sequence[FusingGroup], coverage: Sequence[LoadCoverage]) -> list[str]:
    """Return one sentence for each tensor that would not arrive whole and as it is."""
    errors = {name: error for each in coverage for name, error in each.errors.items()}
    found = [f"{name}: the engine's loader refuses it: {error}" for name, error in errors.items()]
    filled = {name for each in coverage for name in each.filled}
    unfilled = dict.fromkeys(name for each in coverage for name in each.unfilled if name not in filled)
    found += [f"{name}: a parameter of the engine that nothing sent would fill" for name in unfilled]
    # One rank alone may have nothing of a tensor: where sizes are padded, the last ranks hold padding only.
    unknown = set(coverage[0].unknown).intersection(*(each.unknown for each in coverage))
    named = {name for each in coverage for name in each.opaque} | {name for key in errors for name in key.split(", ")}
    for number, group in enumerate(groups):
        held: dict[str, list[SourceView]] = defaultdict(list)
        for source in (source for each in coverage for source in each.sources[number]):
            held[source.name].append(source)
        for entry in group.entries:
            if entry.name in unknown:
                found.append(f"{entry.name}: the engine knows no such parameter and would ignore it")
            elif entry.name not in named:
                found += _misfit(entry, held[entry.name])
    return found


def _misfit(entry: PlacedTensor, held: Sequence[SourceView]) -> list[str]:
    sentences = []
    narrower = {
        each.target_dtype for each in held if torch.promote_types(each.dtype, each.target_dtype) != each.target_dtype
    }
    if narrower:
        short = str(narrower.pop()).removeprefix("torch.")
        sentences.append(
            f"{entry.name}: sent as {str(entry.dtype).removeprefix('torch.')}, but the engine holds {short}: it would be"
            f" rounded; send {short}"
        )
    # Ranks that hold the same rows (replicated heads) read the same elements; others share a tensor.
    read = torch.zeros(max(span(entry.shape, entry.stride), 0), dtype=torch.bool)
    for offset, steps in {(each.offset - entry.offset // entry.dtype.itemsize, each.steps) for each in held}:
        read.as_strided([size for _, size in steps], [stride for stride, _ in steps], offset).fill_(True)
    if (count := int(read.count_nonzero())) < entry.numel:
        sentences.append(
            f"{entry.name}: of its {entry.numel} elements ({list(entry.shape)}) the engine would read {count};"
            " its shape is not the engine's"
        )
    return sentences
