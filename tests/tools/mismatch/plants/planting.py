"""What the files with the plants have in common: how one source of mismatch is planted.

It imports nothing of the harness.

PLANT names what is planted. SGLang calls `register` in every process of an engine before it builds the model; whoever
starts the trainer calls `register_in_trainer` there, before it builds its model. The first planted code that runs makes
the file that PLANT_REACHED names: a release or a device may have another path, which no plant is on.
"""

import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILES = ("planted_sources", "chosen_by_another", "chosen_by_a_second")
PLANTS: dict[str, Callable[[], None]] = {}
TRAINER_PLANTS: dict[str, Callable[[], None]] = {}


def register() -> None:
    """Plant what PLANT names in this process of an engine, if it belongs there."""
    _plant_from(PLANTS)


def register_in_trainer() -> None:
    """Plant what PLANT names in this process of the trainer, if it belongs there."""
    _plant_from(TRAINER_PLANTS)


def _plant_from(plants: dict[str, Callable[[], None]]) -> None:
    for file in FILES:
        importlib.import_module(file)
    plants.get(os.environ.get("PLANT", ""), lambda: None)()


def plant(function: Callable[[], None]) -> Callable[[], None]:
    PLANTS[function.__name__] = function
    return function


def plant_in_trainer(function: Callable[[], None]) -> Callable[[], None]:
    TRAINER_PLANTS[function.__name__] = function
    return function


@functools.cache
def reached() -> None:
    """Note that planted code has run. `wrap` calls this; a plant without `wrap` calls it itself."""
    if file := os.environ.get("PLANT_REACHED"):
        Path(file).touch()


def wrap(owner: Any, name: str, around: Callable[..., Any], when: Callable[..., Any] = lambda *_, **__: True) -> None:
    """Replace a method by around(the method, its self, its other arguments), where `when` of self and the arguments is
    true."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def replaced(self: Any, *args: Any, **kw: Any) -> Any:
        if not when(self, *args, **kw):
            return real(self, *args, **kw)
        reached()
        return around(real, self, *args, **kw)

    setattr(owner, name, replaced)


def rounded(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
    """Around a method that returns a tensor: round it to bfloat16."""
    output = real(self, *args, **kw)
    return output.bfloat16().to(output.dtype)


def in_decode(attention: Any, q: Any, k: Any, v: Any, forward_batch: Any, *args: Any, **kw: Any) -> bool:
    """When RadixAttention.forward decodes, with any attention backend."""
    decodes: bool = forward_batch.forward_mode.is_decode()
    return decodes
