"""Causal language models and value models, sharded by FSDP2 over all ranks.

Every rank builds the model on the meta device and shards it, so that no device ever holds all of it. Random values come
from a generator. Those of a checkpoint are read by rank 0 into host memory, and torch broadcasts them one tensor at a
time. Rank 0 reads with from_pretrained, since files and memory differ: transformers keeps experts fused that files hold
one by one.
"""

import copy
import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig
from transformers.utils import is_flash_attn_2_available

from harness.config.layers import ConfigError
from harness.trainer.offload import local
from harness.trainer.packing import PACKED_EAGER, PACKED_SDPA
from harness.trainer.rows import own_rows

Attention = Literal["sdpa", "eager", "flash_attention_2", "packed_sdpa", "packed_eager"]
VALUE_HEAD = "value_head.weight"
BLOCK_VALUES = 1 << 22
"""Random values for which one generator is seeded: making one takes 50 us, too long for each row of a vocabulary."""


class ValueModel(nn.Module):
    """A transformers backbone with a linear head that turns each position's last hidden state into a value."""

    def __init__(self, backbone: nn.Module, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = nn.Linear(hidden_size, 1, bias=False, dtype=dtype)

    def forward(self, **inputs: Any) -> Tensor:
        """Return values [B, T, 1] in the dtype of the forward. Position t has read the tokens up to and including t."""
        return self.value_head(self.backbone(**inputs, use_cache=False).last_hidden_state)


def load_causal_lm(
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    mesh: DeviceMesh,
    weights: Literal["checkpoint", "random"] = "checkpoint",
    seed: int = 0,
    attention: Attention = "sdpa",
    gradient_checkpointing: bool = False,
    compute_dtype: torch.dtype | None = None,
    value_head: bool = False,
) -> nn.Module:
    """Load the causal language model at `path` (a folder or a hub id), sharded over the 1-D mesh. A collective call.

    weights: "checkpoint" reads the saved tensors. "random" reads only the config and fills the shards with values that depend
        on seed and parameter name, and not on the number of ranks.
    dtype: of the shards, and so of their gradients and of the optimizer's moments. Persistent buffers are always float32.
    compute_dtype: of forward and backward; None for dtype.
    value_head: return a ValueModel. Its head is drawn from seed with std 1 / (hidden_size + 1), as OpenRLHF does: the first
        values are near zero, so that the first advantages come from rewards, and the first update still reaches the
        backbone, which a head of zeros would not let it.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    backbone, model = build_on_meta(config, dtype, attention, gradient_checkpointing, value_head)
    backbone_class = type(backbone)  # fully_shard replaces the class
    shard(model, decoder_layers(backbone), mesh, compute_dtype or dtype)
    allocate(model, device)
    if weights == "random":
        fill_random(model, config, seed)
    else:
        _load_from_rank_0(backbone, path, dtype, backbone_class)
        if value_head:
            fill_random(model, config, seed, only=VALUE_HEAD)
    return model


@torch.no_grad()
def computing_in(
    model: nn.Module,
    dtype: torch.dtype,
    held: torch.dtype,
    mesh: DeviceMesh,
    device: torch.device,
    packed: bool = False,
) -> nn.Module:
    """Return a second model with the shards of a causal language model, whose forward computes in another dtype.

    held: the dtype in which `model` computes. Its parameters are rounded to it first, so that both compute on the same
    values. It has no gradient checkpointing. flash_attention_2 has no float32, so the second model's attention is then
    another one.
    """
    config: Any = copy.deepcopy(model.config)
    attention = config._attn_implementation
    if attention == "flash_attention_2":
        attention, _ = choose_attention(config, "auto", packed)
    backbone, second = build_on_meta(config, dtype, attention)
    shard(second, decoder_layers(backbone), mesh, dtype)
    allocate(second, device)
    for (_, into), (_, tensor) in zip(named_tensors(second), named_tensors(model), strict=True):
        values = local(tensor)
        local(into).copy_(values.to(held) if isinstance(tensor, nn.Parameter) else values)
    return second


def build_on_meta(
    config: PretrainedConfig,
    dtype: torch.dtype,
    attention: Attention = "sdpa",
    gradient_checkpointing: bool = False,
    value_head: bool = False,
) -> tuple[Any, Any]:
    """Return transformers' model of this config, and what is trained: the model itself, or a ValueModel around it.

    Parameters are on the meta device, buffers are not. The arguments are those of load_causal_lm.
    """
    from accelerate import init_empty_weights  # only here: an environment of SGLang alone does not have it

    factory = AutoModel if value_head else AutoModelForCausalLM
    with init_empty_weights(include_buffers=False):
        backbone: Any = factory.from_config(config, attn_implementation=attention, dtype=dtype, trust_remote_code=False)
        model: Any = ValueModel(backbone, config.get_text_config().hidden_size, dtype) if value_head else backbone
    if not value_head:
        model.tie_weights()  # building on the meta device has untied them
        record_renamings(model)
    if gradient_checkpointing:
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return backbone, model


def record_renamings(model: Any) -> None:
    """Give a model that was made from its config the renamings that from_pretrained would record for a published
    checkpoint.

    transformers 5 keeps a part of a model, such as Gemma 3's vision tower, without a prefix of its names (vision_model)
    that every published checkpoint has. It learns of the prefix only as it reads a checkpoint, and puts it back as it
    writes one.
    """
    if find_spec("transformers.conversion_mapping") is None:  # transformers 4 renames nothing
        return
    from transformers.conversion_mapping import get_model_conversion_mapping

    renamings = get_model_conversion_mapping(model, add_legacy=False)
    removed = [each for each in renamings if getattr(each, "prefix_to_remove", None) and each.scope_prefix]
    if removed:
        # That of a whole model tells which of two kinds of checkpoint was read, and not what is published.
        kept = [each for each in renamings if each in removed or not hasattr(each, "prefix_to_remove")]
        model._weight_conversions = kept


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of each parameter and persistent buffer, in module order; tied tensors once."""
    tied = tied_names(model)
    yield from ((name, tensor) for name, tensor in model.state_dict(keep_vars=True).items() if name not in tied)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the names that named_tensors leaves out, each with the first name of the same tensor."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}
    return {name: earlier for name, earlier in names.items() if earlier != name}


def _load_from_rank_0(model: nn.Module, path: str, dtype: torch.dtype, saved_class: type[nn.Module]) -> None:
    """Load the part of the saved model that is of this class into the shards of every rank. A collective call.

    Raise ConfigError if the checkpoint lacks a tensor: transformers would fill it with random values and go on.
    """
    whole: dict[str, Any] = {}
    if dist.get_rank() == 0:
        with _without_mtp_layers(path):
            saved, report = AutoModelForCausalLM.from_pretrained(
                path, output_loading_info=True, dtype=dtype, trust_remote_code=False
            )
        if missing := sorted(report["missing_keys"]):
            raise ConfigError(
                f"{path} must have every tensor of its model, but lacks {missing[0]}; copy or download it again."
            )
        whole = next(module for module in saved.modules() if type(module) is saved_class).state_dict()
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


@contextmanager
def _without_mtp_layers(path: str) -> Iterator[None]:
    """Keep transformers from listing each tensor of layers for multi-token prediction, which its classes do not
    have.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    text = config.get_text_config()
    first, count = text.num_hidden_layers, getattr(text, "num_nextn_predict_layers", None) or 0
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if architecture is None or not count:
        yield
        return
    ignored = "_keys_to_ignore_on_load_unexpected"
    layers = [rf"model\.layers\.{number}\." for number in range(first, first + count)]
    with patch.object(architecture, ignored, [*(getattr(architecture, ignored, None) or ()), *layers]):
        yield


def choose_attention(
    config: PretrainedConfig, wanted: Literal["auto", "sdpa", "eager", "flash_attention_2"], packed: bool = False
) -> tuple[Attention, str]:
    """Return the attention for a model of this config, and why it is not sdpa ("" if it is sdpa, or was asked for).

    Raise ValueError if the config is not of a causal language model, if sdpa was asked for but computes something else,
    if flash attention is not installed, or if sequences are to be packed and the model would let one read another.
    """
    kind = config.model_type
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if architecture is None:
        raise ValueError(
            f"{kind} is not a causal language model in transformers {transformers.__version__}, and the trainer needs one."
        )
    why_not_sdpa = ""
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        why_not_sdpa = f"{kind} caps attention logits (attn_logit_softcapping), and sdpa does not"
    elif not getattr(architecture, "_supports_sdpa", True):
        why_not_sdpa = f"transformers has no sdpa for {kind}"
    if wanted == "sdpa" and why_not_sdpa:
        raise ValueError(f'model.attention = "sdpa" cannot work: {why_not_sdpa}; use "eager" or "auto".')
    if packed and (leaks := _what_leaks_between_packed(config, architecture)):
        raise ValueError(f"model.packed = true cannot work: {kind} has {leaks}; use false.")
    if wanted == "flash_attention_2":
        if not is_flash_attn_2_available():
            raise ValueError(f'model.attention = "{wanted}" needs the package flash-attn; install it, or use "auto".')
        return wanted, ""
    if why_not_sdpa or wanted == "eager":
        return (PACKED_EAGER if packed else "eager"), why_not_sdpa
    return (PACKED_SDPA if packed else "sdpa"), ""


def _what_leaks_between_packed(config: PretrainedConfig, architecture: Any) -> str:
    """Return the features of a model that would leak between packed sequences, or ""."""
    text = config.get_text_config()
    leaks = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if getattr(text, "attention_chunk_size", None):
        leaks.append("attention_chunk_size")
    if getattr(architecture, "_is_stateful", False):
        leaks.append("a recurrent state")
    if not getattr(architecture, "_supports_attention_backend", False):
        leaks.append("attention that cannot be replaced")
    return ", ".join(leaks)


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return the decoder layers of a transformers model: its outermost list with as many modules as num_hidden_layers.

    Raise ConfigError if there is none; the model then cannot be sharded layer by layer.
    """
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():  # outer ones first
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ConfigError(
        f"{type(model).__name__} has no list of num_hidden_layers = {count} layers, and the trainer shards a model layer by"
        " layer; use an architecture whose decoder layers are one nn.ModuleList"
    )


def shard(model: nn.Module, layers: nn.ModuleList, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Shard each decoder layer and the rest of a model on the meta device over the mesh.

    The experts of a layer are gathered by themselves. They are almost all of it, so FSDP2's two copies of what it
    gathers, their gradients, and those in float32 must not be there at the same time as the next layer's. The
    parameters outside the layers are resharded after the forward as well, which FSDP2 would not do by itself: between
    calls every parameter is a DTensor.
    """
    # Parameters are gathered in compute_dtype, gradients reduced in float32. Inputs are not cast: between layers they
    # are in compute_dtype already, and what a model passes on in float32, such as a router's logits, must stay float32.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in layers:
        for unit in (*stacked_experts(layer), layer):
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate the shards of a model on the device, without values.

    Buffers keep theirs; persistent ones become float32.
    """
    tied = tied_names(model)
    buffers = dict(model.named_buffers())
    persistent = {name for name, _ in named_tensors(model)}
    model.to_empty(device=device)  # also reallocates buffers and unties weights, which the loops below mend
    for name, buffer in buffers.items():
        wide = buffer.float() if name in persistent and buffer.is_floating_point() else buffer
        _owner(model, name)._buffers[name.rpartition(".")[2]] = wide.to(device)
    for name, first in tied.items():
        setattr(_owner(model, name), name.rpartition(".")[2], model.get_parameter(first))


def stacked_experts(layer: nn.Module) -> list[nn.Module]:
    """Return the modules of a layer that hold the weights of all its experts as tensors with an axis of experts."""
    return [
        module
        for name, module in layer.named_modules()
        if name.rpartition(".")[2] == "experts" and any(each.ndim >= 3 for each in module.parameters(recurse=False))
    ]


def _owner(model: nn.Module, name: str) -> nn.Module:
    """Return the module that has the tensor of this name."""
    return model.get_submodule(name.rpartition(".")[0])


@torch.no_grad()
def fill_random(model: nn.Module, config: PretrainedConfig, seed: int, only: str | None = None) -> None:
    """Fill this rank's shards of every named tensor, or of the one called `only`, with normal values drawn from seed.

    Matrices have std initializer_range (0.02 if the config has none), norms mean 1 and std 0.1, biases std 0.1: no
    tensor is at a default value, so one that does not arrive in the engine shows. The values of a whole tensor do not
    depend on the number of ranks.
    """
    sizes = config.get_text_config()
    for name, tensor in named_tensors(model):
        if only not in (None, name):
            continue
        values = local(tensor)
        first_row = own_rows(tensor).start
        key = f"{seed}/{name}"
        if tensor.ndim == 1:
            whole = _normal(tuple(tensor.shape), key, values.device) * 0.1 + (
                1.0 if name.endswith("norm.weight") else 0.0
            )
            values.copy_(whole[first_row : first_row + values.shape[0]])
            continue
        std = 1 / (sizes.hidden_size + 1) if name == VALUE_HEAD else getattr(sizes, "initializer_range", 0.02)
        for start, block in random_rows(tensor.shape, first_row, values.shape[0], key, values.device):
            values[start : start + len(block)] = block * std


def random_rows(
    shape: Sequence[int], first_row: int, rows: int, key: str, device: torch.device, block_values: int = BLOCK_VALUES
) -> Iterator[tuple[int, Tensor]]:
    """Yield `rows` rows of a standard normal float32 tensor of this shape, in blocks: (offset from first_row, values).

    A row's values depend only on shape, row, key, block_values and the kind of device, so every rank can draw its own
    rows. One generator is seeded for about block_values values; a rank draws every block that its rows lie in.
    """
    size = max(1, block_values // max(1, math.prod(shape[1:])))
    for start in range(first_row // size * size, first_row + rows, size):
        block = _normal((min(size, shape[0] - start), *shape[1:]), f"{key}/{start}", device)
        yield max(start - first_row, 0), block[max(first_row - start, 0) : first_row + rows - start]


def _normal(shape: tuple[int, ...], key: str, device: torch.device) -> Tensor:
    """Return standard normal float32 values that depend only on shape, key and the kind of device."""
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:4], "little"))
    return torch.randn(shape, generator=generator, device=device)
