"""A 64-bit fingerprint of what a scheduler holds of each checkpoint tensor, computed where the weights are.

An element that stood at place p of its slot counts bits * BASE**p, modulo 2**64. Such sums add up: those of an engine's
ranks, each over its part, are that of the whole tensor, and the trainer's ranks get the same from their shards without
gathering anything. One element that differs always shows, since BASE is odd; of many that differ, 2**-60 are missed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.weights.worker.inspection import write_report
from harness.weights.worker.live_tensors import model_tensors
from harness.weights.worker.loader_trace import Copy

FINGERPRINT = "harness.weights.worker.scheduler_fingerprint.fingerprint"
BASE = 6364136223846793005
"""Its powers repeat after 2**62: it is 5 modulo 8."""
INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 22
"""Elements summed at a time: 32 MiB of products."""
_KEPT = "_harness_fingerprints"


@dataclass(frozen=True, slots=True)
class Part:
    """What one copy filled, and where its elements stood in the slot, in elements of dtype; it keeps no slot alive."""

    target: torch.Tensor
    dtype: torch.dtype
    stride: tuple[int, ...]
    offset: int
    index: torch.Tensor | None
    """int64, of the target's shape, in place of stride and offset, where the elements did not lie in strides."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Parts by bucket, and where the model's tensors lay when they were found."""

    parts: list[list[Part]]
    addresses: dict[str, int]


def keep_parts(model: Any, copies: Sequence[Sequence[Copy]]) -> None:
    """Remember, on the model, what the copies of each bucket fill."""
    aimed_at = {copy.target.untyped_storage().data_ptr() for bucket in copies for copy in bucket}
    lying = {
        name: tensor.data_ptr()
        for name, tensor in model_tensors(model).items()
        if tensor.untyped_storage().data_ptr() in aimed_at
    }
    setattr(model, _KEPT, Kept([[_part(copy) for copy in bucket] for bucket in copies], lying))


def fingerprint(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """What SGLang calls: write `fingerprints` of the model into the folder that the first name gives."""
    write_report(model, fingerprints(model), Path(named_tensors[0][0]))


@torch.no_grad()
def fingerprints(model: Any) -> dict[str, str]:
    """The fingerprint of each part as "<bucket>/<part>" -> number; none where SGLang has meanwhile put other tensors in the
    place of those that the parts refer to, so that they must be found anew."""
    kept: Kept | None = getattr(model, _KEPT, None)
    if kept is None:
        return {}
    now = model_tensors(model)
    if any(name not in now or now[name].data_ptr() != at for name, at in kept.addresses.items()):
        return {}
    keys = [f"{bucket}/{index}" for bucket, parts in enumerate(kept.parts) for index in range(len(parts))]
    sums = [_sum_of(part) for parts in kept.parts for part in parts]
    numbers = torch.stack(sums).tolist() if sums else []
    return {key: str(number) for key, number in zip(keys, numbers, strict=True)}


def weighted_sum(values: torch.Tensor, stride: Sequence[int], offset: int) -> torch.Tensor:
    """int64 []: the sum of bits * BASE**place modulo 2**64, place = offset + the sum of index * stride over dimensions.

    values: of any dtype and strides; an element that a stride of 0 stands for is counted once, and changes the sum
    where its copies are not all equal to it.
    """
    bits = values.view(INTEGER[values.element_size()])
    unequal = torch.zeros((), dtype=torch.int64, device=bits.device)
    for axis, step in enumerate(stride):
        if step == 0 and bits.shape[axis] > 1:
            first = bits.narrow(axis, 0, 1)
            unequal += (bits != first).sum()
            bits = first
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    first_step, *steps = tuple(stride) or (0,)
    rows = bits if bits.ndim else bits.reshape(1)
    if not rows.numel():
        return total
    at_once = max(1, min(len(rows), CHUNK // rows[0].numel()))
    row_weights = powers(first_step, at_once, bits.device)
    weights = [powers(step, size, bits.device) for step, size in zip(steps, rows.shape[1:], strict=True)]
    for start in range(0, len(rows), at_once):
        part = rows[start : start + at_once]
        for weight in reversed(weights):
            part = (part * weight).sum(-1)
        total += (part * row_weights[: len(part)]).sum() * power(first_step * start)
    return total * power(offset) + unequal


def powers(step: int, count: int, device: torch.device) -> torch.Tensor:
    """int64 [count]: BASE**(step * k) modulo 2**64."""
    found = torch.ones(1, dtype=torch.int64, device=device)
    while len(found) < count:
        found = torch.cat([found, found * power(step * len(found))])
    return found[:count]


def power(exponent: int) -> int:
    """BASE**exponent modulo 2**64, as a signed number."""
    return signed(pow(BASE, exponent, 1 << 64))


def signed(number: int) -> int:
    """The int64 that is congruent to it modulo 2**64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _part(copy: Copy) -> Part:
    stride, offset = (copy.source.stride(), copy.source.storage_offset()) if copy.source is not None else ((), 0)
    return Part(copy.target, copy.dtype, tuple(stride), int(offset), copy.index)


def _sum_of(part: Part) -> torch.Tensor:
    values = part.target if part.target.dtype == part.dtype else part.target.to(part.dtype)
    if part.index is not None:
        bits = values.contiguous().view(INTEGER[values.element_size()])
        return (bits * _powers_at(part.index)).sum()
    found = weighted_sum(values, part.stride, part.offset)
    # What an engine holds wider than it was sent must be what it was sent, and not something between.
    return found + (values.to(part.target.dtype) != part.target).sum() if values is not part.target else found


def _powers_at(places: torch.Tensor) -> torch.Tensor:
    """int64: BASE**place modulo 2**64 for each place."""
    found, square, left = torch.ones_like(places), BASE, places.clone()
    while bool((left > 0).any()):
        found = torch.where(left.bitwise_and(1).bool(), found * signed(square), found)
        square, left = square * square % (1 << 64), left >> 1
    return found
