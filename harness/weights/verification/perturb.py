"""A change of every trainer tensor that undoes itself, so that a tensor which is not sent anew shows.

One bit of each element's mantissa is flipped. Flipped twice, the element is as before, bit for bit.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor, Shard

# Integer view of a float type, and its number of mantissa bits. Its first two bits exist in every one of them, and in
# FP8 too, so the change outlives a conversion. And they are the largest: if one router of a tiny DeepSeek-V3 kept its
# old weight, log-probs moved by 0.1 in the mean (transformers, 640 tokens), and by 0.002 with bits 5 and 6, where
# bfloat16 allows 0.03.
VIEWS = {torch.float32: (torch.int32, 23), torch.bfloat16: (torch.int16, 7), torch.float16: (torch.int16, 10)}
CHUNK = 1 << 20
"""Elements changed at a time: the change needs a few chunks of int64 as scratch memory."""


@torch.no_grad()
def perturb(tensors: Mapping[str, torch.Tensor], seed: int) -> None:
    """Flip, in every element, the mantissa bit worth 2**-1 or 2**-2 of its power of two; a second call undoes it.

    A normal number x changes by more than 2**-3 |x| and at most 2**-1 |x|. Finite numbers stay finite, and zero becomes
    a denormal. Which bit is flipped depends on seed, name, shard and position, but not on the device. tensors: float32,
    bfloat16 or float16; of a DTensor, this rank's shard is changed. Integers stay as they are. Raise ValueError for
    other types.
    """
    for name, tensor in tensors.items():
        local, shard = tensor.detach(), "whole"
        if isinstance(tensor, DTensor):  # ranks with the same values must stay the same
            local, coordinates = tensor.to_local(), tensor.device_mesh.get_coordinate() or ()
            pairs = zip(tensor.placements, coordinates, strict=True)
            shard = ",".join(str(at) for placement, at in pairs if isinstance(placement, Shard))
        if local.dtype in VIEWS:
            _flip(local, f"{seed}/{name}/{shard}")
        elif local.is_floating_point():
            raise ValueError(f"{name} must be float32, bfloat16 or float16 to be perturbed, got {local.dtype}")


def _flip(tensor: torch.Tensor, key: str) -> None:
    integer, bits = VIEWS[tensor.dtype]
    flat = tensor.view(integer).view(-1)  # raises if the shard is not contiguous
    digest = hashlib.sha256(key.encode()).digest()
    # Odd factors of full width, with the high bits folded in between: a factor drawn from the key could be too small
    # (every element of a tensor then got the same bit: seed 272), and one factor alone gives as few patterns as there
    # are rotations of one (246 of 1,001 seeds changed a tensor as another seed did).
    offset = int.from_bytes(digest[:8], "little") >> 2
    for start in range(0, flat.numel(), CHUNK):
        chunk = flat[start : start + CHUNK]
        mixed = torch.arange(start, start + chunk.numel(), device=flat.device, dtype=torch.int64)
        mixed.add_(offset).mul_(0x1E3779B97F4A7C15)
        mixed.bitwise_xor_(mixed >> 29).mul_(0x3F58476D1CE4E5B9)
        coin = mixed.bitwise_right_shift_(40).bitwise_and_(1)
        chunk.bitwise_xor_(coin.add_(1).mul_(1 << (bits - 2)).to(integer))
