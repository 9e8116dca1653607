"""What fills a scheduler's weights with garbage, so that whatever the next sync does not bring shows.

Named as a custom weight loader; SGLang runs it in every rank of the engine.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from harness.weights.worker.live_tensors import sent_tensors

SENTINEL = "harness.weights.worker.sentinel.sentinel_model"


@torch.no_grad()
def sentinel_model(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Fill all that a sync must bring with values uniform in (-0.5, 0.5); the first name is a seed.

    Finite, since a NaN in the logits would kill the sampler before anything is compared. Integers and 8-bit floats, which
    no unquantized model has among its weights, stay as they are.
    """
    seed = named_tensors[0][0]
    for name, tensor in sent_tensors(model):
        if tensor.is_floating_point() and tensor.itemsize > 1:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator(tensor.device).manual_seed(int.from_bytes(digest[:4], "little"))
            tensor.uniform_(-0.5, 0.5, generator=generator)
