"""Somebody's own sender, an iterator of (name, tensor), as a checkpoint: what it yields is written to files as it comes,
because a rank's tensors are made of parts that come at any time.
"""

import importlib
import json
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from harness.config.layers import ConfigError
from harness.config.model_fields import WEIGHT_INDEX

FILE_BYTES = 1 << 30
"""About how large one file is; so much is kept in memory."""


def write_checkpoint(sender: str, folder: Path) -> Path:
    """Write what MODULE:FUNCTION yields; return the folder. Raise ConfigError if there is no such function, or if it
    fails, and for what it yields.
    """
    module, _, function = sender.partition(":")
    sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
        for part in function.split("."):
            found = getattr(found, part)
        write_tensors(found(), folder, keep=True)
    except ConfigError:
        raise
    except Exception as error:  # it is the user's own code that fails
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if last.filename == __file__ else f" at {last.filename}:{last.lineno}"
        raise ConfigError(f"--weights {sender}: {type(error).__name__}{where}: {error}") from error
    finally:
        sys.path.remove("")
    return folder


def write_tensors(named_tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, keep: bool) -> None:
    """Write tensors as a checkpoint in safetensors, without a config.json.

    A DTensor is gathered, which is a collective call of the ranks of its mesh. keep: False on the ranks that only take
    part in that. Raise ConfigError for a name that comes twice with other values, and for what is no tensor.
    """
    files: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        file = f"model-{len(set(files.values())):05}.safetensors"
        save_file(pending, folder / file)
        files.update(dict.fromkeys(pending, file))
        pending.clear()

    held = 0
    for name, tensor in named_tensors:
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ConfigError(
                f"a sender must yield (name, tensor), got ({type(name).__name__}, {type(tensor).__name__})."
            )
        whole = _gathered(tensor.detach())
        if not keep:
            continue
        if name in files or name in pending:
            raise ConfigError(f"the sender yields {name} twice; a server would keep the last one.")
        # a copy, as the sender may use its memory again, and safetensors refuses tensors that share some
        pending[name] = whole.to("cpu", copy=True, memory_format=torch.contiguous_format)
        held += whole.nbytes
        if held >= FILE_BYTES:
            flush()
            held = 0
    if pending:
        flush()
    if keep and not files:
        raise ConfigError("the sender yields no tensor.")
    if keep:
        (folder / WEIGHT_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor. A DTensor that was offloaded is gathered where its mesh can."""
    if not isinstance(tensor, DTensor):
        return tensor
    placed = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(placed, DTensor)
    return placed.full_tensor()
