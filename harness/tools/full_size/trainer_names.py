"""The checkpoint tensors that a trainer of a model would send, from transformers' class on the meta device."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from harness.runtime.errors import UnsupportedEnvironment
from harness.trainer.model import named_tensors
from harness.trainer.rows import RowShards
from harness.weights.names import checkpoint_layout
from harness.weights.tensor_view import TensorView

SCALE = "_scale_inv"
"""What DeepSeek's checkpoints add to the name of a weight in blocks of float8 for the name of its scales."""

MXFP4_BLOCK = 32
"""How many numbers share one scale in MXFP4."""


@dataclass(frozen=True, kw_only=True)
class TrainerNames:
    """What a trainer of a model sends."""

    layout: tuple[TensorView, ...]
    """The checkpoint tensors, as views of the trainer's: in one dtype, or as the model's own quantization has it."""
    tensors: dict[str, torch.Tensor]
    """The trainer's tensors by name, on the meta device."""

    def shards(self, ranks: int) -> dict[str, RowShards]:
        """Return how FSDP2 divides each tensor that is sent. Buffers are whole on every rank.

        Scales, which the trainer does not have, are divided like a parameter of their shape.
        """
        found = {}
        for view in self.layout:
            tensor = self.tensors.get(view.of)
            shape = view.shape if tensor is None else tuple(tensor.shape)
            is_sharded = tensor is None or isinstance(tensor, torch.nn.Parameter)
            rows = shape[0] if shape else 1
            elements = torch.Size(shape).numel()
            found[view.of] = RowShards(rows, elements // max(rows, 1), ranks if is_sharded else 1)
        return found


def trainer_layout(folder: Path, dtype: torch.dtype) -> tuple[TensorView, ...]:
    """Return the checkpoint tensors that a trainer sends; see trainer_names."""
    return trainer_names(folder, dtype).layout


def trainer_names(folder: Path, dtype: torch.dtype) -> TrainerNames:
    """Return what is sent, in dtype, or as the model's own quantization has it.

    Raise UnsupportedEnvironment for an architecture that transformers lacks, and for a quantization that is neither in blocks
    of float8 nor gpt-oss's MXFP4: how a trainer would make its names is not known here; and if this transformers cannot build
    the model.
    """
    model_class, config = trainer_class(folder)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        del config.quantization_config
    model = _model_on_meta(model_class, config, dtype)
    tensors = dict(named_tensors(model))
    layout = checkpoint_layout(model, tensors, dtype)
    if quantization is None:
        return TrainerNames(layout=layout, tensors=tensors)
    method = quantization.get("quant_method")
    if getattr(config, "expert_dtype", None) == "fp4":
        raise UnsupportedEnvironment(
            "the trainer's names for experts in 4-bit floats (expert_dtype) are not known here; give a config.json without"
            " expert_dtype and quantization_config"
        )
    if method == "fp8" and quantization.get("weight_block_size"):
        quantized = in_float8_blocks(layout, linear_weights(model), quantization)
    elif method == "mxfp4" and model_class.__name__ == "GptOssForCausalLM":
        quantized = in_mxfp4(layout)
    else:
        raise UnsupportedEnvironment(
            f"the trainer's names for quantization {method} of {model_class.__name__} are not known here; give a config.json"
            " without quantization_config, or one with blocks of float8"
        )
    return TrainerNames(layout=tuple(quantized), tensors=tensors)


def _model_on_meta(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """Return the trainer's model. Raise UnsupportedEnvironment with transformers' own words if this release cannot build it."""
    try:
        with torch.device("meta"):
            model = model_class._from_config(config, dtype=dtype)
    except Exception as error:  # an older class may not know what a newer config.json has
        raise UnsupportedEnvironment(
            f"transformers {transformers.__version__} cannot build {model_class.__name__} from this config.json:"
            f" {type(error).__name__}: {error}"
        ) from error
    model.tie_weights()
    return model


def trainer_class(folder: Path) -> tuple[Any, Any]:
    """Return transformers' class of the model, and its config. Raise UnsupportedEnvironment if transformers has none.

    Kimi-K2 has a model_type of its own and the class of DeepSeek-V3, so the architecture decides where the type does not.
    """
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = fields["architectures"][0]
    found = getattr(transformers, architecture, None)
    if found is None or not hasattr(found, "_from_config"):
        raise UnsupportedEnvironment(
            f"transformers {transformers.__version__} has no class {architecture}, so the trainer's names are not known"
        )
    if fields.get("model_type") == found.config_class.model_type:
        return found, AutoConfig.from_pretrained(folder)
    return found, found.config_class.from_dict(fields | {"model_type": found.config_class.model_type})


def linear_weights(model: Any) -> frozenset[str]:
    """Return the names of the trainer's matrices that a quantization changes: linear layers and experts, but no head.

    Nor what the model's own class keeps in float32, such as the weights_proj of DeepSeek-V3.2's indexer.
    """
    linear = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    experts = {name for name, each in model.named_parameters() if ".experts." in name and each.ndim >= 2}
    head = {name for name, module in model.named_modules() if module is model.get_output_embeddings()}
    wide = [
        *(getattr(model, "_keep_in_fp32_modules", None) or ()),
        *(getattr(model, "_keep_in_fp32_modules_strict", None) or ()),
    ]
    kept = {f"{path}.weight" for path in head} | {name for name in linear if any(each in name for each in wide)}
    return frozenset((linear | experts) - kept)


def in_float8_blocks(
    layout: Collection[TensorView], quantized: Collection[str], quantization: Mapping[str, Any]
) -> Iterator[TensorView]:
    """Yield the tensors of a checkpoint in block float8: each quantized weight, and its scales in float32.

    quantized: the trainer's tensors that are. quantization: as config.json has it, with weight_block_size (rows, columns) and
    perhaps modules_to_not_convert.
    """
    rows, columns = quantization["weight_block_size"]
    kept = tuple(quantization.get("modules_to_not_convert") or quantization.get("ignored_layers") or ())
    for view in layout:
        if view.of not in quantized or any(re.search(rf"(^|\.){re.escape(each)}(\.|$)", view.name) for each in kept):
            yield view
            continue
        yield replace(view, dtype=torch.float8_e4m3fn)
        shape = (-(-view.shape[0] // rows), -(-view.shape[1] // columns))
        name = view.name + SCALE
        # Scales are a tensor of their own for each weight; which module they lie in decides with what they may be fused.
        of = f"{view.of}{SCALE}.{view.name}" if ".experts." in view.of else name
        yield TensorView(name=name, of=of, dtype=torch.float32, shape=shape, stride=(shape[1], 1))


def in_mxfp4(layout: Collection[TensorView]) -> Iterator[TensorView]:
    """Yield the tensors of a checkpoint of gpt-oss in MXFP4: of each matrix of experts its blocks and scales, as bytes.

    In a checkpoint in one dtype a matrix of experts has the axes (expert, input, output). Blocks have (expert, output, block,
    byte): 32 numbers of 4 bits along the input are a block of 16 bytes. Each block has a scale of one byte.
    """
    for view in layout:
        if ".experts." not in view.of or len(view.shape) != 3:
            yield view
            continue
        experts, inputs, outputs = view.shape
        blocks = -(-inputs // MXFP4_BLOCK)
        shapes = {"blocks": (experts, outputs, blocks, MXFP4_BLOCK // 2), "scales": (experts, outputs, blocks)}
        for part, shape in shapes.items():
            name = f"{view.name}_{part}"
            stride = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
            yield TensorView(name=name, of=name, dtype=torch.uint8, shape=shape, stride=stride)
