"""The model's folder as a block-FP8 engine loads it: quantization_config in config.json, and weights with their scales.

It is made from the model's own files, tensor by tensor, without the trainer. So an engine that loaded it holds what the
first sync must bring, and a comparison of the two also checks how the trainer's ranks quantize.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils import cached_file

from harness.config.layers import ConfigError
from harness.config.model_fields import WEIGHT_INDEX
from harness.config.precision import FP8_BLOCK
from harness.weights.fp8_blocks import is_quantized, quantize, scale_name
from harness.weights.model_files import copy_all_but_weights
from harness.weights.names import files_in_checkpoint


def write_quantized_model(source: str, folder: Path, dtype: torch.dtype, *, weights: bool = True) -> None:
    """Write the model in `source`, a folder or a hub id in the cache, to `folder` in block-FP8.

    dtype: what values are rounded to before they are quantized: what an engine of this dtype would hold. weights: False
    leaves the tensors out, for an engine that never loads them. Raise ConfigError if the model has no safetensors
    files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = Path(cached_file(source, "config.json", local_files_only=True))
    copy_all_but_weights(config.parent, folder)
    fields = json.loads(config.read_text(encoding="utf-8")) | {"quantization_config": FP8_BLOCK.checkpoint}
    (folder / "config.json").write_text(json.dumps(fields, indent=2), encoding="utf-8")
    if not weights:
        return
    where, size = dict[str, str](), 0
    for file in _weight_files(source):
        tensors = dict(quantized_tensors(file, dtype))
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file.name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    if len(set(where.values())) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (folder / WEIGHT_INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def quantized_tensors(file: Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a safetensors file, quantized to block-FP8: a weight and its scales, or a tensor that stays
    as it is.
    """
    with safe_open(file, framework="pt") as opened:
        for name in sorted(opened.keys()):
            tensor = opened.get_tensor(name)
            if is_quantized(name, tensor.shape):
                weight, scales = quantize(tensor, dtype)
                yield name, weight
                yield scale_name(name), scales
            else:
                yield name, tensor


def _weight_files(source: str) -> list[Path]:
    if found := sorted(set(files_in_checkpoint(source).values())):
        return [Path(path) for path in found]
    raise ConfigError(
        f'model.name = "{source}" must have its weights as safetensors for model.rollout_precision = "fp8_block", but has no'
        " model.safetensors"
    )
