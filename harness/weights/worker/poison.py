"""Overwrite what a sync is to fill, before it comes: whatever it does not bring then shows, whether the trainer moved
or not.

The trace of the loader says what that is: what it copies, makes zero, computes, and what it derives from all that.
Nothing else is touched, because no sync would mend it.
"""

from typing import Any

import torch

from harness.weights.worker.kept_trace import kept_trace

BYTE = 0x20
"""Added to a number below 16 this is finite and not zero in every 8-bit float of torch."""
VALUES = 16


@torch.no_grad()
def poison(model: Any, number: int) -> list[str]:
    """Fill everything that the traced loader fills with one value; return the engine's tensors that have to stay as
    they are.

    number: of the sync. Two that follow each other poison with different values. They are finite, because a NaN in the
    logits would kill the sampler before anything is compared. Integers wider than a byte stay: one of them may be an
    index.
    """
    kept, left = kept_trace(model), list[str]()
    kept.refresh()
    for name, tensor in kept.filled_tensors():
        if tensor.is_floating_point() and tensor.itemsize > 1:
            tensor.fill_(poison_value(number))
        elif tensor.itemsize == 1 and tensor.dtype != torch.bool:
            tensor.view(torch.uint8).fill_(BYTE + number % VALUES)
        else:
            left.append(name)
    return left


def poison_value(number: int) -> float:
    """Return what sync `number` poisons with: exact in bfloat16 and float16, and no value that a model begins with."""
    return 0.2578125 + number % VALUES / 64
