"""The tensors of a scheduler's model: which there are, and which of them a sync must bring."""

from collections.abc import Iterator
from typing import Any

import torch

# Plain attributes that SGLang makes of kv_b_proj as it loads it: MLA computes with these alone.
DERIVED = ("w_kc", "w_vc")


def model_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Parameters, buffers and plain tensor attributes by name."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return tensors | derived_tensors(model)


def derived_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Tensors that modules keep as plain attributes, such as DeepSeek's absorbed w_kc and w_vc."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def addresses(model: Any) -> dict[str, int]:
    """Where each tensor of the model lies."""
    return {name: tensor.data_ptr() for name, tensor in model_tensors(model).items()}


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
