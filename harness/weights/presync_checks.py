"""Would every tensor arrive? Asked of the engine's own loader before anything is sent.

Each scheduler says which of a layout's elements it would copy to where (rollout/worker/trace.py). A name that nobody
reads, a shape that does not fit, a dtype that would be rounded, or an engine parameter that nothing fills is refused
here, while the engine still serves.
"""

from collections.abc import Sequence
from math import gcd

import torch

from harness.weights.stream.slots import SlotEntry
from harness.weights.worker.reader import LoadCoverage, Region

SHOWN = 8


class WeightsRefused(ValueError):
    """Weights that must not be sent: said before the engine sees them, which goes on serving."""


def check_coverage(buckets: Sequence[Sequence[SlotEntry]], coverage: Sequence[LoadCoverage]) -> None:
    """Raises WeightsRefused, naming tensors, unless the schedulers of one engine together take every element."""
    found = problems(buckets, coverage)
    if found:
        more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        raise WeightsRefused("; ".join([*found[:SHOWN], *more]))


def problems(buckets: Sequence[Sequence[SlotEntry]], coverage: Sequence[LoadCoverage]) -> list[str]:
    """One sentence for each tensor that would not arrive whole and as it is."""
    found: dict[str, None] = {}
    for arrival in coverage:
        found |= {f"{name}: the engine's loader refuses it: {error}": None for name, error in arrival.errors.items()}
    # One rank alone may have nothing of a tensor: where sizes are padded, the last ranks hold padding only.
    unknown = _on_all([arrival.unknown for arrival in coverage])
    found |= {f"{name}: the engine knows no such parameter and would ignore it": None for name in unknown}
    filled = {name for arrival in coverage for name in arrival.filled}
    unfilled = [name for arrival in coverage for name in arrival.unfilled if name not in filled]
    found |= {f"{name}: a parameter of the engine that nothing sent would fill": None for name in unfilled}
    named = {*unknown, *(name for arrival in coverage for name in arrival.opaque)}
    named |= {name for arrival in coverage for key in arrival.errors for name in key.split(", ")}
    for index, bucket in enumerate(buckets):
        regions = [region for arrival in coverage for region in arrival.regions[index]]
        found |= {sentence: None for entry in bucket if entry.name not in named for sentence in _misfit(entry, regions)}
    return list(found)


def _on_all(names: Sequence[Sequence[str]]) -> list[str]:
    """Those on every list, in the order of the first."""
    return [name for name in names[0] if all(name in each for each in names[1:])] if names else []


def _misfit(entry: SlotEntry, regions: Sequence[Region]) -> list[str]:
    mine = [region for region in regions if entry.name in region.names]
    sentences = []
    narrowed = sorted({_short(region.target_dtype) for region in mine if _loses(region.dtype, region.target_dtype)})
    if narrowed:
        sentences.append(
            f"{entry.name}: sent as {_short(entry.dtype)}, but the engine holds {', '.join(narrowed)}:"
            f" it would be rounded; send {narrowed[0]}"
        )
    if any(region.index is not None for region in mine):
        return sentences  # elements that do not lie in strides are compared when they are read back
    # Ranks that hold the same rows (replicated heads) read the same region; others share a tensor without overlap.
    read = _elements(mine)
    if read < entry.numel:
        sentences.append(
            f"{entry.name}: of its {entry.numel} elements ({list(entry.shape)}) the engine would read {read};"
            " its shape is not the engine's"
        )
    return sentences


def _elements(regions: Sequence[Region]) -> int:
    """How many different elements the regions read together."""
    boxes = {
        (region.offset, tuple(sorted(pair for pair in zip(region.stride, region.shape, strict=True) if pair[0])))
        for region in regions
        if torch.Size(region.shape).numel()
    }
    if not boxes:
        return 0
    first = min(offset for offset, _ in boxes)
    # Counted in runs of elements that all regions take together, so that a large tensor needs few marks.
    unit = 0
    for offset, pairs in boxes:
        inner = pairs[0][1] if pairs and pairs[0][0] == 1 else 1
        unit = gcd(unit, inner, offset - first, *(stride for stride, size in pairs if stride != 1 and size > 1))
    marks: list[torch.Tensor] = []
    for offset, pairs in boxes:
        at = torch.tensor([(offset - first) // unit])
        for stride, size in pairs:
            steps = (
                torch.arange(size // unit) if stride == 1 else torch.arange(size) * (stride // unit if size > 1 else 0)
            )
            at = (at.unsqueeze(-1) + steps).flatten()
        marks.append(at)
    return int(torch.cat(marks).unique().numel()) * unit


def _loses(sent: torch.dtype, held: torch.dtype) -> bool:
    """Whether a value of dtype `sent` may not fit into `held`."""
    return torch.promote_types(sent, held) != held


def _short(dtype: torch.dtype) -> str:
    """Such as bfloat16."""
    return str(dtype).removeprefix("torch.")
