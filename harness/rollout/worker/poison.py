"""What fills a scheduler's weights with garbage, so that whatever the next sync does not bring shows.

Named as a custom weight loader, as harness/rollout/worker.py explains; SGLang runs it in every rank of the engine.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

POISON = "harness.rollout.worker.poison.poison_model"

# Plain attributes that SGLang makes of kv_b_proj as it loads it: MLA computes with these alone.
DERIVED = ("w_kc", "w_vc")


@torch.no_grad()
def poison_model(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
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


def sent_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, persistent buffers and what is derived from them. Others, such as rotary caches, nobody sends."""
    yield from model.named_parameters()
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer
        for name in DERIVED:
            if isinstance(getattr(module, name, None), torch.Tensor):
                yield f"{path}.{name}", getattr(module, name)
