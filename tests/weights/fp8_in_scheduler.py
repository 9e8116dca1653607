"""Run inside SGLang's schedulers, as custom weight loaders: break what engine rank 0 holds in block-FP8.

Each takes the engine's name of a tensor as the name of the only tensor.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from harness.weights.traced.model_state import model_tensors

FLIP = f"{__name__}.flip_a_bit"
DOUBLE = f"{__name__}.double_a_scale"

Named = Sequence[tuple[str, torch.Tensor]]


def flip_a_bit(model: Any, named_tensors: Named) -> None:
    """Flip one bit of the first byte of an e4m3 tensor."""
    held = model_tensors(model)[named_tensors[0][0]].detach()
    assert held.dtype == torch.float8_e4m3fn
    if dist.get_rank() == 0:
        held.view(torch.uint8).view(-1)[:1].bitwise_xor_(1)


def double_a_scale(model: Any, named_tensors: Named) -> None:
    """Double the first of the scales."""
    held = model_tensors(model)[named_tensors[0][0]].detach()
    assert held.dtype == torch.float32
    if dist.get_rank() == 0:
        held.view(-1)[:1].mul_(2)
