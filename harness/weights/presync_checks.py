"""Checks before anything is sent, while the engine still serves.

The trainer's shards are there and finite, and the engine's own loader, as traced, would take every tensor whole.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import compress, pairwise
from math import prod
from types import MappingProxyType

import torch
from torch.distributed.tensor import DTensor

from harness.cluster.world import all_gather
from harness.trainer.rows import own_rows
from harness.weights.findings import Finding
from harness.weights.fusing import FusingGroup
from harness.weights.tensor_view import TensorView, loses_precision, span, without_numbers
from harness.weights.traced.coverage import LoadCoverage, LoaderCopy

SHOWN = 8
"""How many tensors a message names."""
UNFILLED = ("unfilled", "filled in part")
"""Kinds of findings on a parameter that no rank's loader fills whole."""


class WeightsRefused(ValueError):
    """Weights that must not be sent; raised before the engine sees them."""


def check_shards(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise WeightsRefused on every rank if a shard is missing or ranks differ in a name, shape or dtype.

    Collective.
    """
    mine = {name: (tuple(tensor.shape), str(tensor.dtype), _missing_rows(tensor)) for name, tensor in tensors.items()}
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
    """Return what this rank lacks, or "" if it holds its part."""
    if tensor.device.type == "meta":
        return "has it on the meta device, without values"
    if not isinstance(tensor, DTensor):
        return ""
    due, rows = len(own_rows(tensor)), tensor.to_local().shape[0]
    return "" if rows == due else f"holds {rows} of the {due} rows of its shard"


def check_complete(layout: Iterable[TensorView], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise WeightsRefused unless the checkpoint's tensors are together all elements of the tensors to send."""
    sent = dict.fromkeys(tensors, 0)
    for view in layout:
        sent[view.of] += view.numel
    for name, tensor in tensors.items():
        if sent[name] != tensor.numel():
            raise WeightsRefused(f"{name}: the checkpoint's tensors hold {sent[name]} of its {tensor.numel()} elements")


def check_finite(tensors: Mapping[str, torch.Tensor], layout: Iterable[TensorView] = ()) -> None:
    """Raise WeightsRefused on every rank, naming tensors with a NaN or an infinity. A collective call of all ranks.

    layout: as the tensors are sent. What is sent in float16 must be finite there, which ends at 65504.
    """
    sums = {}
    narrow = {view.of for view in layout if view.dtype == torch.float16}
    for name, tensor in tensors.items():
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        if local.is_floating_point():
            local = local.to(torch.float16) if name in narrow else local
            wide = local.to(torch.float32) if local.itemsize == 1 else local  # torch multiplies no 8-bit floats
            sums[name] = wide.mul(0).sum(dtype=torch.float32)  # zero, unless one value is not finite
    wrong = list(compress(sums, torch.stack(list(sums.values())).isnan().tolist())) if sums else []
    found = {name: rank for rank, names in reversed(list(enumerate(all_gather(wrong)))) for name in names}
    if found:
        listed = ", ".join(f"{name} (rank {rank})" for name, rank in list(found.items())[:SHOWN])
        sent = ", as they are sent in float16 (up to 65504)" if narrow else ""
        raise WeightsRefused(f"{len(found)} tensor(s) hold a NaN or an infinity{sent}: {listed}; nothing was sent.")


def check_coverage(
    groups: Sequence[FusingGroup],
    coverage: Sequence[LoadCoverage],
    *,
    whole_checkpoint: bool = False,
    tied: Mapping[str, str] = MappingProxyType({}),
    buffers: Collection[str] = (),
) -> list[str]:
    """Raise WeightsRefused, naming tensors, unless the schedulers of one engine together take every element.

    whole_checkpoint: all that the model's own checkpoint has is sent. Then return a sentence for each parameter of the
    engine that nothing fills, instead of refusing: SGLang's own load does not fill it either (FalconH1's q_norm, which
    its forward pass does not use). tied: the trainer's names of tensors that are not sent, as each is another one,
    whose name follows. Tied parameters that the engine needs are still refused. buffers: the trainer's names of its
    buffers. Also warn of parameters that only some ranks fill, if that may be padding.
    """
    found, told = [], []
    for each in coverage_problems(groups, coverage, buffers):
        if each.kind not in UNFILLED or not whole_checkpoint:
            found.append(str(each))
        elif first := tied.get(each.tensor):
            found.append(f"{each}; the trainer ties it to {first}, and SGLang's class does not")
        else:
            told.append(f"{each}, nor does the model's own checkpoint")
    on_some = unfilled_on_some_ranks(coverage)
    found += [str(each) for each in on_some if each.kind == "ignored"]
    if found:
        raise WeightsRefused(first_of(found))
    return [*told, *map(str, on_some)]


def first_of(names: Sequence[str]) -> str:
    """Return the first names and the number of the others, or "none found"."""
    more = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return "; ".join([*names[:SHOWN], *more]) or "none found"


def coverage_problems(
    groups: Sequence[FusingGroup], coverage: Sequence[LoadCoverage], buffers: Collection[str] = ()
) -> list[Finding]:
    """Return a finding for each tensor that would not arrive whole and unchanged. buffers: the trainer's names of its
    own.
    """
    errors = {names: error for each in coverage for names, error in each.errors.items()}
    found = [
        Finding(kind="refused", tensor=name, names=tuple(others), counts={"error": error})
        for (name, *others), error in ((names, error) for names, error in errors.items())
    ]
    reasons = dict.fromkeys(each.only_once for each in coverage if each.only_once)
    found += [Finding(kind="once", tensor="", counts={"why": why}) for why in reasons]
    found += unfilled_parameters(coverage)
    counts = Counter(view.name for group in groups for view in group.views)
    twice = {name: count for name, count in counts.items() if count > 1}
    found += [Finding(kind="twice", tensor=name, counts={"times": count}) for name, count in twice.items()]
    found += _overwritten(coverage)
    found += _too_short(groups, coverage)
    # A tensor is unknown only if no rank reads it: where sizes are padded, the last ranks hold padding only.
    unknown = set(coverage[0].unknown).intersection(*(each.unknown for each in coverage))
    untold = {name for each in coverage for name in each.opaque}
    refused = {name for names in errors for name in names}
    for number, group in enumerate(groups):
        copies: dict[str, list[LoaderCopy]] = defaultdict(list)
        for copy in (copy for each in coverage for copy in each.copies[number]):
            copies[copy.source.name].append(copy)
        for view in (each for each in group.views if each.name not in refused):
            if view.name in unknown:
                found.append(Finding(kind="unknown", tensor=view.name))
            elif view.name not in untold and view.name not in twice:
                found += _misfit(view, copies[view.name], coverage[0].dtype, is_buffer=view.of in buffers)
    return found


def unfilled_parameters(coverage: Sequence[LoadCoverage]) -> list[Finding]:
    """Return a finding for each parameter that no scheduler's loader fills whole.

    Where sizes are padded, the last ranks hold padding that nothing fills.
    """
    least: dict[str, tuple[int, int]] = {}
    for name, numbers in (item for each in coverage for item in each.missing.items()):
        least[name] = min(numbers, least.get(name, numbers))
    return [
        Finding(
            kind="unfilled" if missing == elements else "filled in part",
            tensor=name,
            counts={"missing": missing, "elements": elements},
        )
        for name, (missing, elements) in least.items()
        if missing
    ]


def unfilled_on_some_ranks(coverage: Sequence[LoadCoverage]) -> list[Finding]:
    """Return a finding for each parameter that a rank's loader ignores and another's fills whole.

    Ranks that fill it from different elements hold shards of it, and the others padding. If two fill it from the same
    ones, all ranks should hold the same ("ignored"). If only one does, it may be a tensor that is not larger than a
    shard.
    """
    # The ranks of a stage have the same parameters.
    stages: dict[tuple[str, ...], list[LoadCoverage]] = defaultdict(list)
    for each in coverage:
        stages[tuple(sorted(each.missing))].append(each)
    findings = []
    for names, ranks in stages.items():
        for name in names:
            without = [each.rank for each in ranks if each.missing[name][0] == each.missing[name][1] > 0]
            filled = {each.rank: _read_into(name, each) for each in ranks if each.missing[name][0] == 0}
            if without and filled and len(set(filled.values())) == 1:
                kind = "ignored" if len(filled) > 1 else "ignored or padding"
                counts = {"filled": ", ".join(map(str, filled))}
                findings.append(Finding(kind=kind, tensor=name, ranks=tuple(without), counts=counts))
    return findings


def _read_into(name: str, coverage: LoadCoverage) -> frozenset[tuple[object, ...]]:
    """Return what a scheduler's loader reads to fill one of the engine's parameters."""
    sources = (copy.source for copies in coverage.copies for copy in copies if copy.into == name)
    return frozenset((source.name, source.offset, source.steps) for source in sources)


def _overwritten(coverage: Sequence[LoadCoverage]) -> list[Finding]:
    """Return a finding for each of the engine's tensors of which two names fill the same elements."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for each in coverage:
        for name in each.overwritten:
            ranks[name].append(each.rank)
    findings = []
    for name, found in ranks.items():
        holding = [each.rank for each in coverage if name in each.missing]
        where = "" if found == holding else f" on engine rank {', '.join(map(str, found))}"
        first, second = next(each.overwritten[name] for each in coverage if name in each.overwritten)
        counts = {"first": first, "second": second, "where": where}
        findings.append(Finding(kind="written twice", tensor=name, counts=counts))
    return findings


def _too_short(groups: Sequence[FusingGroup], coverage: Sequence[LoadCoverage]) -> list[Finding]:
    """Return a finding for each tensor behind which the loaders write zeros that the model's config does not
    explain.
    """
    findings = []
    for number, group in enumerate(groups):
        views = {view.name: view for view in group.views}
        for into in dict.fromkeys(name for each in coverage for name in each.padded.get(number, ())):
            zeros = {each.rank: each.padded.get(number, {}).get(into, 0) for each in coverage}
            reads = _reads_into(into, number, coverage)
            filled = sum(read.numel for members in reads.values() for _, read in members)
            ranks = {rank for rank, count in zeros.items() if count}
            ranks |= {rank for members in reads.values() for rank, _ in members}
            sizes = next(each.sizes for each in coverage if zeros[each.rank])
            short = _shorter_names(reads, len(ranks))
            made_zero = sum(zeros.values())
            cut = {name: _cut_sizes(views[name], [read for _, read in reads[name]]) for name in short or reads}
            if all(
                sizes.explain(each or views[name].shape, filled, made_zero, len(ranks))
                or (not each and sizes.add_once(name, views[name].shape))
                for name, each in cut.items()
            ):
                continue
            counts = {"into": into, "zeros": made_zero}
            name, *others = reads
            if len(reads) > 1 and not short:
                findings.append(Finding(kind="one short", tensor=name, names=tuple(others), counts=counts))
            findings += [
                Finding(kind="short", tensor=each, counts={"shape": list(views[each].shape), **counts})
                for each in short or ([] if others else [name])
            ]
    return findings


def _reads_into(into: str, number: int, coverage: Sequence[LoadCoverage]) -> dict[str, list[tuple[int, TensorView]]]:
    """Return checkpoint tensor -> (engine rank, what it reads of it) for the copies of a group into one of the engine's
    tensors.
    """
    reads: dict[str, list[tuple[int, TensorView]]] = defaultdict(list)
    for each in coverage:
        for copy in each.copies[number]:
            if copy.into == into:
                reads[copy.source.name].append((each.rank, copy.source))
    return reads


def _cut_sizes(view: TensorView, reads: Iterable[TensorView]) -> list[int]:
    """Return the sizes of a tensor along which some of the reads are only a part of it."""
    parts = [dict(read.steps) for read in reads]
    return [size for stride, size in view.steps if any(part.get(stride, 1) < size for part in parts)]


def _shorter_names(reads: Mapping[str, Sequence[tuple[int, TensorView]]], ranks: int) -> list[str]:
    """Return the names of which the ranks read less than of others that differ in numbers alone, or some ranks less
    than others.

    ranks: how many share each name, unless some of the names are of other experts.
    """
    kinds: dict[str, dict[str, Counter[int]]] = defaultdict(dict)
    for name, members in reads.items():
        counts = kinds[without_numbers(name)][name] = Counter()
        for rank, read in members:
            counts[rank] += read.numel
    found = []
    for alike in kinds.values():
        most = max(max(counts.values()) for counts in alike.values())
        sharing = ranks if len(alike) == 1 else max(map(len, alike.values()))
        found += [name for name, counts in alike.items() if sum(counts.values()) < most * sharing]
    return found


def _misfit(
    view: TensorView, copies: Sequence[LoaderCopy], engine_dtype: torch.dtype | None, *, is_buffer: bool
) -> Iterator[Finding]:
    """Yield what is wrong with the copies that the schedulers make of one checkpoint tensor.

    What the engine holds narrower than its other parameters is its own choice, which its load from disk makes too. So
    it is what it holds as these of a buffer, which a trainer keeps in float32: dots1's correction bias.
    """
    narrower = {copy.held for copy in copies if loses_precision(copy.source.dtype, copy.held)}
    narrower -= {held for held in narrower if engine_dtype and loses_precision(engine_dtype, held)}
    if is_buffer and engine_dtype:
        narrower.discard(engine_dtype)
    if narrower:
        sent, held = (str(each).removeprefix("torch.") for each in (view.dtype, narrower.pop()))
        yield Finding(kind="rounded", tensor=view.name, counts={"sent": sent, "held": held})
    shape = {"shape": list(view.shape)}
    if (count := elements_read(view, [copy.source for copy in copies])) < view.numel:
        yield Finding(kind="read in part", tensor=view.name, counts={**shape, "elements": view.numel, "read": count})
    elif any(_is_reviewed(view, copy.source) for copy in copies):
        yield Finding(kind="reshaped", tensor=view.name, counts=shape)
    if view.of == view.name and len(view.shape) == 2 and len(set(view.shape)) == 1 and view.stride[0] < view.stride[1]:
        yield Finding(kind="transposed", tensor=view.name)


def _is_reviewed(view: TensorView, read: TensorView) -> bool:
    """Return whether an axis along which a loader reads begins inside an axis of the tensor and goes on beyond its end.

    A loader may join axes, and divide one, but never join a part of one to others.
    """
    return any(
        stride < step < stride * size < step * count for step, count in read.steps for stride, size in view.steps
    )


def elements_read(view: TensorView, reads: Iterable[TensorView]) -> int:
    """Return how many elements of a checkpoint tensor are in at least one of the reads.

    Ranks that hold the same rows, such as replicated heads, read the same elements, so sizes cannot be added up. Almost
    always the reads are boxes that differ along one axis; then their ranges are joined, and nothing is marked. Boxes
    that differ along several, such as a rank's columns of each expert, are marked on the grid of their edges.
    """
    distinct = {(read.offset - view.offset, read.steps) for read in reads if read.numel}
    boxes = [_box(view, *each) for each in distinct]
    if all(boxes):
        found = [box for box in boxes if box]
        return count if (count := _joined(found)) is not None else _on_grid(found)
    marked = torch.zeros(max(span(view.shape, view.stride), 0), dtype=torch.bool)
    for offset, steps in distinct:
        marked.as_strided([size for _, size in steps], [stride for stride, _ in steps], offset).fill_(True)
    return int(marked.count_nonzero())


def _box(view: TensorView, offset: int, steps: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...] | None:
    """Return the range that a read has along each axis of the view, by falling stride; None if it is no such box."""
    axes, sizes, ranges = sorted(view.steps, reverse=True), dict(steps), []
    for stride, length in axes:
        start, offset = divmod(offset, stride)
        size = sizes.pop(stride, 1)
        if start < 0 or start + size > length:
            return None
        ranges.append((start, start + size))
    return None if sizes or offset or len(steps) != len(dict(steps)) else tuple(ranges)


def _on_grid(boxes: Sequence[tuple[tuple[int, int], ...]]) -> int:
    """Return how many elements are in at least one box.

    The edges of all boxes cut each axis; a cell is read whole or not.
    """
    edges = [sorted({edge for box in boxes for edge in box[axis]}) for axis in range(len(boxes[0]))]
    at = [{edge: number for number, edge in enumerate(axis)} for axis in edges]
    read = torch.zeros([len(axis) - 1 for axis in edges], dtype=torch.bool)
    for box in boxes:
        read[tuple(slice(at[axis][start], at[axis][stop]) for axis, (start, stop) in enumerate(box))] = True
    sizes = [[stop - start for start, stop in pairwise(axis)] for axis in edges]
    return sum(prod(sizes[axis][place] for axis, place in enumerate(cell)) for cell in read.nonzero().tolist())


def _joined(boxes: Sequence[tuple[tuple[int, int], ...]]) -> int | None:
    """Return how many elements are in at least one box; None if the boxes differ along more than one axis."""
    if not boxes:
        return 0
    differing = [axis for axis, ranges in enumerate(zip(*boxes, strict=True)) if len(set(ranges)) > 1]
    if len(differing) > 1:
        return None
    rest = prod(stop - start for axis, (start, stop) in enumerate(boxes[0]) if axis not in differing)
    if not differing:
        return rest
    length, reached = 0, 0
    for start, stop in sorted({box[differing[0]] for box in boxes}):
        length += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return length * rest
