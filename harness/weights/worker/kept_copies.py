"""Copies of weights that the engine's modules make while they compute, and use from then on: a router's in float32, say.

An update changes the weight and not the copy, so the engine goes on with the old values (sglang#35883). That a tensor is a copy
shows only while it still equals the weight. So copies are looked for when the engine has started, as it may have captured CUDA
graphs, and after each rollout; they are compared after the next load or sync.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_KEPT = "_harness_kept_copies"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter lies in a tensor that a module keeps: in these rows, of the transposed tensor or of the tensor itself."""

    first_row: int = 0
    transposed: bool = False

    def of(self, held: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Return a view of what is held of the parameter, in the parameter's shape."""
        rows = held.mT if self.transposed else held
        return rows.narrow(0, self.first_row, len(parameter)) if parameter.ndim else rows


@torch.no_grad()
def find_copies(model: Any, _: None = None) -> int:
    """Note what modules keep beside their parameters and equals one of them. Return how many copies are known."""
    known: dict[tuple[str, str], Place] = model.__dict__.setdefault(_KEPT, {})
    for name, held, parameter_name, parameter in _kept_beside_parameters(model):
        pair = (name, parameter_name)
        if pair not in known and (place := _place(held, parameter)):
            known[pair] = place
    return len(known)


@torch.no_grad()
def stale_copies(model: Any, _: None = None) -> dict[str, str]:
    """Return the copies that were found and that their parameters do not equal any more: their names -> the parameters'."""
    known: dict[tuple[str, str], Place] = model.__dict__.get(_KEPT, {})
    stale: dict[str, list[str]] = {}
    for name, held, parameter_name, parameter in _kept_beside_parameters(model) if known else ():
        place = known.get((name, parameter_name))
        if place and not torch.equal(place.of(held, parameter), parameter.to(held.dtype)):
            stale.setdefault(name, []).append(parameter_name)
    return {name: " and ".join(parameters) for name, parameters in stale.items()}


def _place(held: torch.Tensor, parameter: torch.Tensor) -> Place | None:
    """Return where the parameter's values lie in what is held: as they are, transposed, or as some of its rows."""
    values = parameter.to(held.dtype)
    if values.min() == values.max():  # one value in every element, as in a bias of zeros, may be there by chance
        return None
    for place in _possible_places(held, values):
        if torch.equal(place.of(held, values), values):
            return place
    return None


def _possible_places(held: torch.Tensor, values: torch.Tensor) -> Iterator[Place]:
    if held.shape == values.shape:
        yield Place()
    elif held.shape[1:] == values.shape[1:]:  # longer: parameters that were put together
        alike = (held == values[0]).flatten(1).all(1) if held.ndim > 1 else held == values[0]
        starts = alike.nonzero().flatten().tolist()
        yield from (Place(first_row=start) for start in starts if start + len(values) <= len(held))
    if values.ndim == 2 and held.mT.shape == values.shape:
        yield Place(transposed=True)


def _kept_beside_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor, str, torch.Tensor]]:
    """Yield each tensor that is a buffer or an attribute, with each parameter that it may hold, in memory of its own.

    The parameter is one of the same module, or of a module directly below it. A tensor may be in a list or tuple, and be an
    attribute of the module or of one of its parameters.
    """
    for path, module in model.named_modules():
        values = vars(module) | module._buffers | _kept_on(module._parameters)
        kept = dict(found for name, value in values.items() for found in _floats_in(name, value))
        if not kept:
            continue
        near = [("", module), *((f"{name}.", child) for name, child in module.named_children())]
        for prefix, owner in near:
            for own_name, parameter in owner._parameters.items():
                for name, held in kept.items():
                    if parameter is not None and _may_hold(held, parameter):
                        yield _joined(path, name), held, _joined(path, prefix + own_name), parameter


def _kept_on(parameters: Mapping[str, torch.nn.Parameter | None]) -> dict[str, Any]:
    """Return the attributes of the parameters themselves, by name."""
    return {
        f"{name}.{key}": value
        for name, each in parameters.items()
        for key, value in getattr(each, "__dict__", {}).items()
    }


def _floats_in(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the floating-point tensors of a value: itself, or those in a list or tuple."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.itemsize > 1:  # torch compares no float8
            yield name, value
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _floats_in(f"{name}[{index}]", each)


def _may_hold(held: torch.Tensor, parameter: torch.Tensor) -> bool:
    if not parameter.numel() or held.ndim != parameter.ndim or held.numel() < parameter.numel():
        return False
    fits = held.shape[1:] == parameter.shape[1:] or (held.ndim == 2 and held.mT.shape == parameter.shape)
    return fits and held.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr()


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}".removeprefix(".")
