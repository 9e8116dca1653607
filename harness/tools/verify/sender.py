"""Somebody's own sender, an iterator of (name, tensor), as a checkpoint: what it yields is written to files as it comes,
because a rank's tensors are made of parts that come at any time.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from harness.config.layers import ConfigError
from harness.config.model_fields import WEIGHT_INDEX
from harness.tools.user_sender import words_of, yielded_by

FILE_BYTES = 1 << 30
"""About how large one file is; so much is kept in memory."""


def write_checkpoint(sender: str, folder: Path) -> Path:
    """Write what MODULE:FUNCTION yields; return the folder. Raise ConfigError if there is no such function, or if it
    fails, and for what it yields.
    """
    try:
        with yielded_by(sender) as named_tensors:
            write_tensors(named_tensors, folder, keep=True)
    except ConfigError:
        raise
    except Exception as error:  # it is the user's own code that fails
        raise ConfigError(f"--weights {sender}: {words_of(error)}") from error
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
    for name, tensor in _pairs(named_tensors):
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


def _pairs(named_tensors: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a sender gives. Raise ConfigError for what is no pair of a name and a tensor."""
    what = "a sender must yield (name, tensor)"
    if isinstance(named_tensors, Mapping) or not isinstance(named_tensors, Iterable):
        items = "; return its .items()" if isinstance(named_tensors, Mapping) else ""
        raise ConfigError(f"{what}, and gives a {type(named_tensors).__name__}{items}.")
    for item in named_tensors:
        pair = item if isinstance(item, tuple | list) else (item,)
        if len(pair) != 2 or not isinstance(pair[0], str) or not isinstance(pair[1], torch.Tensor):
            raise ConfigError(f"{what}, and yields ({', '.join(type(each).__name__ for each in pair)}).")
        yield pair[0], pair[1]


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor. A DTensor that was offloaded is gathered where its mesh can."""
    if not isinstance(tensor, DTensor):
        return tensor
    placed = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(placed, DTensor)
    return placed.full_tensor()
