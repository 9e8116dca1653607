"""The tensors of a scheduler's model: which there are, and 64-bit fingerprints of what they hold.

A fingerprint is computed where the weights are. The element at place p of a tensor counts bits * BASE**p, modulo 2**64.
Such sums add up: the sums of an engine's ranks, each over its part of a tensor, make the sum of the whole tensor, and
the trainer's ranks get the same number from their shards without gathering anything. A single element that differs
always shows, because BASE is odd. If many differ, the chance that they cancel is 2**-60.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from harness.weights.tensor_view import TensorView

# Plain attributes that SGLang derives while it loads a weight -> the module of that weight. MLA computes with these
# alone.
DERIVED = {"w_kc": "kv_b_proj", "w_vc": "kv_b_proj"}
SCALES_OF_KV_CACHE = (".k_scale", ".v_scale")
WEIGHTS_IN_8_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
BASE = 6364136223846793005
"""5 modulo 8, so its powers repeat only after 2**62 places."""
WRAP = 1 << 64
INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 22
"""Elements summed at a time: 32 MiB of products."""


@torch.no_grad()
def reset_scales_of_kv_cache(model: Any, _: None = None) -> None:
    """Set the scales of the KV cache to 1, as a load of a checkpoint without any leaves them.

    Dummy weights make them random, released memory forgets them, and no trainer has them. Attention multiplies by them
    even where the KV cache is not in FP8.
    """
    for module in model.modules():
        for name in SCALES_OF_KV_CACHE:
            held = module._parameters.get(name[1:])
            if held is not None:
                held.fill_(1.0)
                setattr(module, f"{name[1:]}_float", 1.0)


def synced_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, persistent buffers and tensors derived from them; other buffers, such as rotary caches, are not
    sent.
    """
    yield from sent_parameters(model)
    for path, module in model.named_modules():
        found = {name: each for name, each in module._buffers.items() if name not in module._non_persistent_buffers_set}
        for name, tensor in (found | {name: getattr(module, name, None) for name in DERIVED}).items():
            if isinstance(tensor, torch.Tensor):
                yield f"{path}.{name}".removeprefix("."), tensor


def sent_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters that a sync must bring.

    A quantized engine has scales of its KV cache too. They are 1 unless a checkpoint has them, and no trainer does.
    """
    for name, parameter in model.named_parameters():
        if not name.endswith(SCALES_OF_KV_CACHE):
            yield name, parameter


def derived_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that modules keep as plain attributes, such as DeepSeek's absorbed w_kc and w_vc."""
    return {
        f"{path}.{name}".removeprefix("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def model_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return parameters, buffers and plain tensor attributes by name."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return tensors | derived_tensors(model)


class Powers:
    """The powers of BASE for one pass over many tensors, each made once.

    In a scheduler every operator of torch waits for SGLang's polling loop, and making the powers anew took four fifths
    of them.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, torch.device], torch.Tensor] = {}

    def of(self, step: int, count: int, device: torch.device) -> torch.Tensor:
        """Return int64 [count]: BASE**(step * k) modulo 2**64."""
        key = step, count, device
        if key not in self._made:
            self._made[key] = _powers(step, count, device)
        return self._made[key]


def weighted_sum(
    values: torch.Tensor, stride: Sequence[int], offset: int, powers: Powers | None = None
) -> torch.Tensor:
    """Return int64 []: the sum of bits * BASE**place modulo 2**64, place = offset + the sum of index * stride.

    values: of any dtype and strides. Along a stride of 0 all values must be the same element: it is counted once, and
    the sum changes if they are not equal. powers: of a pass over many tensors.
    """
    powers = powers or Powers()
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
    row_weights = powers.of(first_step, at_once, bits.device)
    weights = [powers.of(step, size, bits.device) for step, size in zip(steps, rows.shape[1:], strict=True)]
    for start in range(0, len(rows), at_once):
        part = rows[start : start + at_once]
        for weight in reversed(weights):
            part = (part * weight).sum(-1)
        total += (part * row_weights[: len(part)]).sum() * _power(first_step * start)
    return total * _power(offset) + unequal


def fingerprint(target: torch.Tensor, source: TensorView, powers: Powers | None = None) -> torch.Tensor:
    """Return int64 []: the sum of what a copy of the source filled, in the dtype in which it was sent."""
    values = target.to(source.dtype)
    found = weighted_sum(values, source.stride, source.offset, powers)
    # A wider value that the engine holds must be exactly one that was sent, not something that rounds to it.
    return found if values is target else found + (values.to(target.dtype) != target).sum()


def _powers(step: int, count: int, device: torch.device) -> torch.Tensor:
    """Return int64 [count]: BASE**(step * k) modulo 2**64."""
    found = torch.ones(1, dtype=torch.int64, device=device)
    while len(found) < count:
        found = torch.cat([found, found * _power(step * len(found))])
    return found[:count]


def _power(exponent: int) -> int:
    """Return the int64 that is congruent to BASE**exponent modulo 2**64."""
    return (pow(BASE, exponent, WRAP) + WRAP // 2) % WRAP - WRAP // 2
