"""A 64-bit fingerprint of what a scheduler holds of each checkpoint tensor, computed where the weights are.

An element that stood at place p of its slot counts bits * BASE**p, modulo 2**64. Such sums add up: those of the ranks of
an engine, each over its part, are that of the whole tensor, and the trainer's ranks get the same from their shards without
gathering anything. One element that differs always shows, since BASE is odd; of many that differ, 2**-60 are missed.
"""

from collections.abc import Sequence
from typing import Any

import torch

from harness.weights.worker.loader_trace import Copy
from harness.weights.worker.model_state import Addresses, Call, write_report

FINGERPRINT = f"{__name__}.report_fingerprints"
BASE = 6364136223846793005
"""Its powers repeat after 2**62: it is 5 modulo 8."""
WRAP = 1 << 64
INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 22
"""Elements summed at a time: 32 MiB of products."""
_KEPT = "_harness_fingerprints"


def keep_copies(model: Any, copies: Sequence[Sequence[Copy]]) -> None:
    """Remember, on the model, what the copies of each bucket fill."""
    setattr(model, _KEPT, (copies, Addresses(model, [copy.target for bucket in copies for copy in bucket])))


def report_fingerprints(model: Any, call: Call) -> None:
    """Write `fingerprints` of the model into the folder that the call names; runs in every scheduler."""
    write_report(model, fingerprints(model), call)


@torch.no_grad()
def fingerprints(model: Any) -> dict[str, str]:
    """Return the fingerprint of what each copy filled as "<bucket>/<copy>" -> number.

    Empty where SGLang has meanwhile put other tensors in the place of those: the copies must be traced anew.
    """
    copies, addresses = getattr(model, _KEPT, ([], None))
    if addresses is None or not addresses.still_hold(model):
        return {}
    sums = {f"{bucket}/{part}": _sum_of(copy) for bucket, each in enumerate(copies) for part, copy in enumerate(each)}
    numbers = torch.stack(list(sums.values())).tolist() if sums else []
    return {key: str(number) for key, number in zip(sums, numbers, strict=True)}


def weighted_sum(values: torch.Tensor, stride: Sequence[int], offset: int) -> torch.Tensor:
    """Return int64 []: the sum of bits * BASE**place modulo 2**64, place = offset + the sum of index * stride.

    values: of any dtype and strides; an element that a stride of 0 stands for is counted once, and changes the sum
    where its copies are not all equal to it.
    """
    bits = values.view(INTEGER[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    unequal = torch.zeros_like(total)
    for axis, step in enumerate(stride):
        if step == 0 and bits.shape[axis] > 1:
            first = bits.narrow(axis, 0, 1)
            unequal += (bits != first).sum()
            bits = first
    first_step, *steps = tuple(stride) or (0,)
    rows = bits if bits.ndim else bits.reshape(1)
    if not rows.numel():
        return total
    at_once = max(1, min(len(rows), CHUNK // rows[0].numel()))
    row_weights = _powers(first_step, at_once, bits.device)
    weights = [_powers(step, size, bits.device) for step, size in zip(steps, rows.shape[1:], strict=True)]
    for start in range(0, len(rows), at_once):
        part = rows[start : start + at_once]
        for weight in reversed(weights):
            part = (part * weight).sum(-1)
        total += (part * row_weights[: len(part)]).sum() * _power(first_step * start)
    return total * _power(offset) + unequal


def _sum_of(copy: Copy) -> torch.Tensor:
    target, region = copy.target, copy.region
    values = target.to(region.dtype)
    if region.index is not None:
        bits = values.contiguous().view(INTEGER[values.element_size()])
        return (bits * _powers_at(region.index.to(bits.device))).sum()
    found = weighted_sum(values, region.stride, region.offset)
    # What an engine holds wider than it was sent must be what it was sent, and not something between.
    return found if values is target else found + (values.to(target.dtype) != target).sum()


def _powers(step: int, count: int, device: torch.device) -> torch.Tensor:
    """Return int64 [count]: BASE**(step * k) modulo 2**64."""
    found = torch.ones(1, dtype=torch.int64, device=device)
    while len(found) < count:
        found = torch.cat([found, found * _power(step * len(found))])
    return found[:count]


def _powers_at(places: torch.Tensor) -> torch.Tensor:
    """Return int64: BASE**place modulo 2**64 for each place."""
    found, square, left = torch.ones_like(places), BASE, places.clone()
    while bool((left > 0).any()):
        found = torch.where(left.bitwise_and(1).bool(), found * _signed(square), found)
        square, left = square * square % WRAP, left >> 1
    return found


def _power(exponent: int) -> int:
    return _signed(pow(BASE, exponent, WRAP))


def _signed(number: int) -> int:
    """Return the int64 that is congruent to a number modulo 2**64."""
    return (number + WRAP // 2) % WRAP - WRAP // 2
