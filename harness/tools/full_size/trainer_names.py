"""The checkpoint tensors that a trainer of a model would send, from transformers' class on the meta device."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from harness.config.fp8_rules import BLOCK
from harness.config.precision import RolloutPrecision
from harness.runtime.errors import UnsupportedEnvironment
from harness.trainer.model import record_renamings
from harness.trainer.rows import RowShards
from harness.weights.converter import CheckpointConverter
from harness.weights.fp8_blocks import Fp8BlockConverter, scale_name
from harness.weights.tensor_view import TensorView

MXFP4_BLOCK = 32
"""How many numbers share one scale in MXFP4."""


@dataclass(frozen=True, kw_only=True)
class TrainerNames:
    """What a trainer of a model sends."""

    layout: tuple[TensorView, ...]
    """The checkpoint tensors, as views of the trainer's: in one dtype, or as the model's own quantization has it."""
    tensors: dict[str, torch.Tensor]
    """The trainer's tensors by name, on the meta device."""
    buffers: frozenset[str] = frozenset()
    """Those of them that are buffers."""
    scales: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the tensors of scales that a sync makes for blocks of float8, see Fp8BlockConverter.scale_shapes."""

    def shards(self, ranks: int) -> dict[str, RowShards]:
        """Return how FSDP2 divides each tensor that is sent. Buffers are whole on every rank.

        Blocks and scales of MXFP4, which no trainer here has, are divided like a parameter of their shape.
        """
        found = {}
        for view in self.layout:
            tensor = self.tensors.get(view.of)
            if view.of in self.scales:
                shape, is_sharded = self.scales[view.of], len(self.scales[view.of]) > 1
            elif tensor is None:
                shape, is_sharded = view.shape, True
            else:
                shape, is_sharded = tuple(tensor.shape), isinstance(tensor, torch.nn.Parameter)
            rows = shape[0] if shape else 1
            elements = torch.Size(shape).numel()
            found[view.of] = RowShards(rows, elements // max(rows, 1), ranks if is_sharded else 1)
        return found

    def copy_bytes(self, shards: Mapping[str, RowShards]) -> int:
        """Return the bytes of quantized weights and their scales that trainer rank 0, which has most, keeps between
        syncs. shards: as `shards` returns them.
        """
        made = {
            view.of: view.dtype for view in self.layout if view.of in self.scales or scale_name(view.of) in self.scales
        }
        rows = {name: len(shards[name].rows_of(0)) * shards[name].row_elements for name in made}
        return sum(count * made[name].itemsize for name, count in rows.items())


def trainer_layout(folder: Path, dtype: torch.dtype) -> tuple[TensorView, ...]:
    """Return the checkpoint tensors that a trainer sends; see trainer_names."""
    return trainer_names(folder, dtype).layout


def trainer_names(folder: Path, dtype: torch.dtype, precision: RolloutPrecision = "same") -> TrainerNames:
    """Return what is sent, in dtype, or as the model's own quantization has it.

    precision: of the engine's weights, as model.rollout_precision. A trainer of a model that is published in blocks of
    float8 computes in dtype too, and quantizes at each sync what is published so.

    Raise UnsupportedEnvironment for an architecture that transformers lacks, and for a quantization that is neither in
    blocks of float8 nor gpt-oss's MXFP4: how a trainer would make its names is not known here; and if this transformers
    cannot build the model.
    """
    model_class, config = trainer_class(folder)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        del config.quantization_config
    model = _model_on_meta(model_class, config, dtype)
    source = CheckpointConverter(model, dtype)
    tensors = dict(source.tensors())
    buffers = frozenset(name for name, each in tensors.items() if not isinstance(each, torch.nn.Parameter))
    plain = TrainerNames(layout=source.layout(), tensors=tensors, buffers=buffers)
    if quantization is None:
        return plain if precision == "same" else in_float8_blocks(plain, Fp8BlockConverter(source))
    method = quantization.get("quant_method")
    if getattr(config, "expert_dtype", None) == "fp4":
        raise UnsupportedEnvironment(
            "the trainer's names for experts in 4-bit floats (expert_dtype) are not known here; give a config.json without"
            " expert_dtype and quantization_config"
        )
    if method == "fp8" and quantization.get("weight_block_size") == [BLOCK, BLOCK]:
        published = published_weights(plain.layout, linear_weights(model), quantization)
        return in_float8_blocks(plain, Fp8BlockConverter(source, lambda name, _: name in published))
    if method == "mxfp4" and model_class.__name__ == "GptOssForCausalLM":
        return replace(plain, layout=tuple(in_mxfp4(plain.layout)))
    raise UnsupportedEnvironment(
        f"the trainer's names for quantization {method} of {model_class.__name__} are not known here; give a config.json"
        f" without quantization_config, or one with blocks of float8 of {BLOCK} x {BLOCK}"
    )


def _model_on_meta(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """Return the trainer's model.

    Raise UnsupportedEnvironment with transformers' own words if this release cannot build it.
    """
    try:
        with torch.device("meta"):
            model = model_class._from_config(config, dtype=dtype)
    except Exception as error:  # an older class may not know what a newer config.json has
        raise UnsupportedEnvironment(
            f"transformers {transformers.__version__} cannot build {model_class.__name__} from this config.json:"
            f" {type(error).__name__}: {error}"
        ) from error
    model.tie_weights()
    record_renamings(model)
    return model


def trainer_class(folder: Path) -> tuple[Any, Any]:
    """Return transformers' class of the model, and its config. Raise UnsupportedEnvironment if transformers has none.

    Kimi-K2 has a model_type of its own and the class of DeepSeek-V3, so the architecture decides where the type does
    not. Phi-3.5-MoE's architecture is spelled otherwise than transformers' class, which a run finds by the type.
    """
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture, kind = fields["architectures"][0], fields.get("model_type")
    found = getattr(transformers, architecture, None)
    if (found is None or not hasattr(found, "_from_config")) and kind in CONFIG_MAPPING:
        found = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[kind], None)
    if found is None or not hasattr(found, "_from_config"):
        raise UnsupportedEnvironment(
            f"transformers {transformers.__version__} has no class {architecture}, and none for model_type {kind}, so the"
            " trainer's names are not known"
        )
    if kind == found.config_class.model_type:
        return found, AutoConfig.from_pretrained(folder, trust_remote_code=False)
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


def published_weights(
    layout: Collection[TensorView], linear: Collection[str], quantization: Mapping[str, Any]
) -> frozenset[str]:
    """Return the names of the weights that a published checkpoint has in blocks of float8.

    linear: see linear_weights. quantization: as config.json has it, perhaps with modules_to_not_convert.
    """
    kept = tuple(quantization.get("modules_to_not_convert") or quantization.get("ignored_layers") or ())
    return frozenset(
        view.name
        for view in layout
        if view.of in linear and not any(re.search(rf"(^|\.){re.escape(each)}(\.|$)", view.name) for each in kept)
    )


def in_float8_blocks(plain: TrainerNames, converter: Fp8BlockConverter) -> TrainerNames:
    """Return what a sync with this converter sends in place of `plain`: quantized weights, and their scales."""
    return replace(plain, layout=converter.layout(), scales=converter.scale_shapes())


def in_mxfp4(layout: Collection[TensorView]) -> Iterator[TensorView]:
    """Yield the tensors of a checkpoint of gpt-oss in MXFP4: of each matrix of experts its blocks and scales, as bytes.

    In a checkpoint in one dtype a matrix of experts has the axes (expert, input, output). Blocks have (expert, output,
    block, byte): 32 numbers of 4 bits along the input are a block of 16 bytes. Each block has a scale of one byte.
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
