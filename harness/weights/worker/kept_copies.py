"""Copies that modules of the engine make of their weights while they compute, such as a router's in float32.

No load reaches them, so an update leaves the engine computing with the old weights (sglang#35883). A copy can be told from its
weight only while both are equal: so copies are looked for after a rollout, and compared after the next sync.
"""

from collections.abc import Iterator
from typing import Any

import torch

_KEPT = "_harness_kept_copies"


@torch.no_grad()
def find_copies(model: Any, _: None = None) -> int:
    """Note the tensors that modules keep beside their parameters and that equal one of them. Return how many are known."""
    known: dict[str, str] = model.__dict__.setdefault(_KEPT, {})
    for name, held, parameter_name, parameter in _alike(model):
        # One value in every element, as in a bias of zeros, may be there by chance.
        if name not in known and torch.equal(held, parameter.to(held.dtype)) and held.min() != held.max():
            known[name] = parameter_name
    return len(known)


@torch.no_grad()
def stale_copies(model: Any, _: None = None) -> dict[str, str]:
    """Return the copies that were found and that their parameter does not equal any more: their names -> the parameter's."""
    known: dict[str, str] = model.__dict__.get(_KEPT, {})
    return {
        name: parameter_name
        for name, held, parameter_name, parameter in _alike(model)
        if known.get(name) == parameter_name and not torch.equal(held, parameter.to(held.dtype))
    }


def _alike(model: Any) -> Iterator[tuple[str, torch.Tensor, str, torch.Tensor]]:
    """Yield each tensor that is a buffer or a plain attribute, with a parameter of its shape in memory of its own.

    The parameter is one of the same module, or of a module directly below it.
    """
    for path, module in model.named_modules():
        kept = {
            name: each
            for name, each in (vars(module) | module._buffers).items()
            if isinstance(each, torch.Tensor) and each.is_floating_point()
        }
        if not kept:
            continue
        near = [("", module), *((f"{name}.", child) for name, child in module.named_children())]
        for prefix, owner in near:
            for own_name, parameter in owner._parameters.items():
                for name, held in kept.items():
                    if parameter is not None and held.shape == parameter.shape and not _same_memory(held, parameter):
                        yield _joined(path, name), held, _joined(path, prefix + own_name), parameter


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}".removeprefix(".")
