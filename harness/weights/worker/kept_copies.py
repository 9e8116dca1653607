"""Copies of weights that the engine makes while it computes, and uses from then on: a router's in float32, say.

An update changes the weight and not the copy, so the engine goes on with the old values (sglang#35883). That a tensor
is a copy shows only while it still equals the weight. So copies are looked for when the engine has started, as it may
have captured CUDA graphs, and after each rollout; they are compared after the next one. Only then, as an engine may
renew a copy when it computes.

Looked at is what can be reached from the modules of the model: their buffers and attributes, what hangs on their
parameters, the dicts, lists and objects among these, and the global variables of the files that define the modules'
classes. A copy in another place, or one that was scaled, shows at level full, in the log-probs.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn

from harness.weights.traced.model_state import synced_tensors

_KEPT = "_harness_kept_copies"
LAYER = re.compile(r"^((?:.*?\.)?\d+)\.")
"""The layer of a tensor or module: its name up to the first number."""
DEPTH = 4
"""How deep in each other dicts, lists and objects are opened."""
MOST_OPENED = 2000
"""How many of them are opened for one layer, and how long they may be: an object may hold a whole engine."""
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
CLOSED = (nn.Module, ModuleType, type, str, bytes)
"""What is not opened. Modules within the model are looked at by themselves."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter lies in a tensor that is held: in these rows, of the tensor itself or transposed, or in another
    shape.
    """

    first_row: int = 0
    transposed: bool = False
    reshaped: bool = False

    def of(self, held: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Return what is held of the parameter, in the parameter's shape."""
        if self.reshaped:
            return held.reshape(parameter.shape)
        rows = held.mT if self.transposed else held
        return rows.narrow(0, self.first_row, len(parameter)) if parameter.ndim else rows


Copy = tuple[str, torch.Size, Place]
"""The name and shape of what is held, and where in it a parameter lies."""


@torch.no_grad()
def find_copies(model: Any, _: None = None) -> int:
    """Note what is held beside the parameters and equals one of them. Return how many copies are known.

    Several parameters may have the same values, as dummy weights of one shape have: it is then a copy of one of them.
    """
    known: dict[Copy, dict[str, None]] = model.__dict__.setdefault(_KEPT, {})
    found: dict[Copy, dict[str, None]] = {}
    for name, held, parameter_name, parameter in _kept_beside_parameters(model):
        if place := _place(held, parameter):
            found.setdefault((name, held.shape, place), {})[parameter_name] = None
    for copy, parameters in found.items():
        known[copy] = {each: None for each in known.get(copy, ()) if each in parameters} or parameters
    return len(known)


@torch.no_grad()
def stale_copies(model: Any, _: None = None) -> dict[str, str]:
    """Return the copies that were found and that equal none of their parameters any more: their names -> the
    parameters'.
    """
    known: dict[Copy, dict[str, None]] = model.__dict__.get(_KEPT, {})
    places: dict[str, list[Copy]] = {}
    for copy in known:
        places.setdefault(copy[0], []).append(copy)
    left: set[Copy] = set()
    right: set[Copy] = set()
    for name, held, parameter_name, parameter in _kept_beside_parameters(model) if known else ():
        for copy in places.get(name, ()):
            if held.shape == copy[1] and parameter_name in known[copy]:
                is_right = torch.equal(copy[2].of(held, parameter), parameter.to(held.dtype))
                (right if is_right else left).add(copy)
    stale: dict[str, list[str]] = {}
    for copy in known:
        if copy in left - right:
            stale.setdefault(copy[0], []).append(" or ".join(known[copy]))
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
    elif held.ndim == values.ndim and held.shape[1:] == values.shape[1:]:  # longer: parameters that were put together
        starts = (held.reshape(len(held), -1)[:, 0] == values.flatten()[0]).nonzero().flatten().tolist()
        yield from (Place(first_row=start) for start in starts if start + len(values) <= len(held))
    if values.ndim == 2 and held.ndim == 2 and held.mT.shape == values.shape:
        yield Place(transposed=True)
    if held.shape != values.shape and held.numel() == values.numel():
        yield Place(reshaped=True)


def _kept_beside_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor, str, torch.Tensor]]:
    """Yield each tensor that is held beside the parameters, with each parameter or synced buffer that it may be a copy
    of.

    What modules of one layer hold is compared with the layer's own tensors; what is held elsewhere, with those of all
    layers. What a sync brings is no copy, and neither is what shares memory with it.
    """
    everything = list(synced_tensors(model))
    brought = {_memory(tensor) for _, tensor in everything}
    by_layer: dict[str, list[tuple[str, torch.Tensor]]] = {"": everything}
    for name, parameter in everything:
        if layer := _layer_of(name):
            by_layer.setdefault(layer, []).append((name, parameter))
    for layer, kept in _kept_by_layer(model).items():
        for name, held in kept.items():
            if _memory(held) in brought:
                continue
            for parameter_name, parameter in by_layer.get(layer, ()):
                if _may_hold(held, parameter):
                    yield name, held, parameter_name, parameter


def _kept_by_layer(model: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Return what modules hold beside their parameters, by layer and name; under "" what belongs to no layer or to
    all.
    """
    searches: dict[str, _Search] = {}
    files: set[str] = set()
    for path, module in model.named_modules():
        search = searches.setdefault(_layer_of(f"{path}."), _Search())
        own = {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}
        for name, value in (own | module._buffers | _kept_on(module._parameters)).items():
            search.open(_joined(path, name), value)
        files.add(type(module).__module__)
    globally = searches.setdefault("", _Search())
    for file in sorted(files - {nn.Module.__module__}):
        for name, value in list(vars(sys.modules[file]).items()) if file in sys.modules else ():
            if isinstance(value, dict | list | torch.Tensor) and not name.startswith("__"):
                globally.open(f"{file}.{name}", value)
    return {layer: search.found for layer, search in searches.items()}


@dataclass(slots=True)
class _Search:
    """Collects the floating-point tensors that the modules of one layer hold, each under the first name it has."""

    found: dict[str, torch.Tensor] = field(default_factory=dict)
    _seen: dict[int, Any] = field(default_factory=dict)  # by id(), and alive, so that no other value gets its id

    def open(self, name: str, value: Any, depth: int = 0) -> None:
        """Keep a tensor, or what is in a dict, list or object."""
        if isinstance(value, torch.Tensor):
            if value.is_floating_point() and value.itemsize > 1:  # torch compares no float8
                self.found[name] = value
            return
        inside = _inside(value) if depth < DEPTH else ()
        if not 0 < len(inside) <= MOST_OPENED or id(value) in self._seen or len(self._seen) >= MOST_OPENED:
            return
        self._seen[id(value)] = value
        for key, each in inside:
            self.open(name + key, each, depth + 1)


def _inside(value: Any) -> list[tuple[str, Any]]:
    """Return what a value holds, each with what follows the value's name in its own name."""
    if isinstance(value, dict):
        return [(f"[{key!r:.60}]", each) for key, each in list(value.items())]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", each) for index, each in enumerate(value)]
    if isinstance(value, CLOSED):
        return []
    slots = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
    attributes = {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})
    return [(f".{name}", each) for name, each in attributes.items()]


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _kept_on(parameters: Mapping[str, torch.nn.Parameter | None]) -> dict[str, Any]:
    """Return the attributes of the parameters themselves, by name."""
    return {
        f"{name}.{key}": value
        for name, each in parameters.items()
        for key, value in getattr(each, "__dict__", {}).items()
    }


def _may_hold(held: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a parameter fits in what is held."""
    if not parameter.numel() or held.numel() < parameter.numel() or held.device != parameter.device:
        return False
    is_longer = held.ndim == parameter.ndim and held.shape[1:] == parameter.shape[1:]
    return is_longer or held.numel() == parameter.numel()


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _layer_of(name: str) -> str:
    found = LAYER.match(name)
    return found[1] if found else ""


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}".removeprefix(".")
