"""Trainer names -> checkpoint names: what `save_pretrained` would write, as views of the trainer's tensors.

transformers 5 holds experts fused (`experts.gate_up_proj`) and writes them one by one (`experts.0.gate_proj.weight`).
SGLang knows the names on disk and silently ignores all others. transformers can undo its own fusing; here it does so
once, on meta tensors, which shows where each checkpoint tensor lies in the trainer's.
"""

import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.overrides import TorchFunctionMode
from transformers.utils import cached_file

from harness.config.layers import ConfigError
from harness.weights.tensor_view import TensorView


class NotAViewError(ValueError):
    """A checkpoint tensor is not a view of one of the trainer's tensors: sending it needs another Converter."""


class _SlicesStayViews(TorchFunctionMode):
    """Let Tensor.contiguous() return a slice of a live tensor itself, not a copy of it.

    Newer releases of transformers (5.19 does, 5.12 does not) make each expert that they cut out of a fused tensor
    contiguous for its file. That changes no value, but the copy no longer shows which live tensor it came from. A
    transposed tensor is still copied, because what we send keeps the order of the live tensor's dimensions.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.contiguous and list(args[0].stride()) == sorted(args[0].stride(), reverse=True):
            return args[0]
        return func(*args, **(kwargs or {}))


def checkpoint_layout(
    model: Any, live: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> tuple[TensorView, ...]:
    """Return the tensors of a checkpoint of `model`, in the order of the live tensors, by name within one of them.

    live: full shapes and dtypes by the trainer's names; values are not read. dtype: the checkpoint's dtype for
    parameters, if it is not the trainer's; buffers keep theirs. Raise NotAViewError for an architecture whose
    checkpoint merges or computes tensors.
    """
    meta = {}
    for name, each in live.items():
        is_weight = isinstance(each, torch.nn.Parameter) and each.is_floating_point()
        meta[name] = torch.empty(each.shape, dtype=dtype if dtype and is_weight else each.dtype, device="meta")
    owner_of = {each.untyped_storage()._cdata: name for name, each in meta.items()}
    saved_as = meta
    if find_spec("transformers.core_model_loading") is not None:  # transformers 4 fuses nothing
        from transformers.core_model_loading import revert_weight_conversion

        with _SlicesStayViews():
            saved_as = revert_weight_conversion(model, dict(meta))
    layout: dict[str, list[TensorView]] = {name: [] for name in live}
    for name, saved in sorted(saved_as.items()):
        owner = owner_of.get(saved.untyped_storage()._cdata)
        if owner is None:
            raise NotAViewError(
                f"{name} of {type(model).__name__} must be a view of one of the trainer's tensors, but transformers computes"
                " it from several, or from other values; give WeightSync a Converter that does the same."
            )
        layout[owner].append(
            TensorView(
                name=name,
                of=owner,
                dtype=saved.dtype,
                shape=tuple(saved.shape),
                stride=tuple(saved.stride()),
                offset=int(saved.storage_offset()),
            )
        )
    return tuple(tensor for tensors in layout.values() for tensor in tensors)


def names_in_checkpoint(model: str) -> frozenset[str]:
    """Return the names of the tensors in the model's safetensors files; empty if there are none, as for random weights.

    model: a folder, or a hub id of which the files are in the cache.
    """
    index = _cached(model, "model.safetensors.index.json")
    if index:
        return frozenset(json.loads(Path(index).read_text())["weight_map"])
    file = _cached(model, "model.safetensors")
    if not file:
        return frozenset()
    with safe_open(file, framework="pt") as opened:
        return frozenset(opened.keys())


def files_in_checkpoint(model: str) -> dict[str, str]:
    """Return the path of the safetensors file that holds each tensor of a model; empty if there are none.

    model: a folder, or a hub id of which the files are in the cache. Raise ConfigError for a file that is missing
    there.
    """
    index = _cached(model, "model.safetensors.index.json")
    if not index:
        file = _cached(model, "model.safetensors")
        return dict.fromkeys(names_in_checkpoint(model), file) if file else {}
    shards = json.loads(Path(index).read_text())["weight_map"]
    paths = {shard: _cached(model, shard) for shard in set(shards.values())}
    if absent := sorted(shard for shard, path in paths.items() if not path):
        raise ConfigError(f"{model} must have {absent[0]}, which its index of safetensors files names.")
    return {name: path for name, shard in shards.items() if (path := paths[shard])}


def _cached(model: str, file: str) -> str | None:
    return cached_file(
        model, file, local_files_only=True, _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False, _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
