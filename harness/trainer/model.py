"""FSDP2 models: a causal language model, or a value model on the same backbone, sharded over all ranks.

Every rank builds the model on the meta device and shards it, so that no device ever holds it whole. The values come
from a generator, or from a checkpoint, which rank 0 reads into its host's memory and torch broadcasts one tensor at a
time. It reads through transformers' from_pretrained, which knows how files differ from memory: transformers 5 keeps
experts fused that files hold one by one.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig
from transformers.utils import is_flash_attn_2_available

from harness.trainer.packing import PACKED_EAGER, PACKED_SDPA

Attention = Literal["sdpa", "eager", "flash_attention_2", "packed_sdpa", "packed_eager"]
DTYPE = "dtype" if hasattr(PretrainedConfig(), "dtype") else "torch_dtype"
"""The keyword under which this transformers takes a dtype: renamed in 4.56."""
VALUE_HEAD = "value_head.weight"
BLOCK_VALUES = 1 << 22  # a generator takes 50 us to make: not one for each row of a vocabulary


class ValueModel(nn.Module):
    """A transformers backbone, and a linear head that makes a scalar of each position's last hidden state."""

    def __init__(self, backbone: nn.Module, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = nn.Linear(hidden_size, 1, bias=False, dtype=dtype)

    def forward(self, **inputs: Any) -> Tensor:
        """Return values [B, T, 1] in the forward's dtype; position t has read the tokens up to and including t."""
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
    """Load the causal language model at path (a folder, or a hub id), sharded over the 1-D mesh; a collective call.

    weights "checkpoint" reads the saved tensors, "random" reads the config alone and fills each rank's shards, with
    values that depend on seed and parameter name and not on the world size. Shards, and with them gradients and the
    optimizer's moments, have `dtype`; forward and backward use copies in compute_dtype (None: dtype). Persistent buffers
    are float32 always. value_head: return a ValueModel; its head is drawn from seed, with std 1 / sqrt(hidden_size + 1),
    as in arXiv 2009.01325: not zero, so that the first update reaches the backbone.
    """
    config = AutoConfig.from_pretrained(path)
    factory = AutoModel if value_head else AutoModelForCausalLM
    with init_empty_weights(include_buffers=False):
        backbone: Any = factory.from_config(config, attn_implementation=attention, **{DTYPE: dtype})
        model: Any = ValueModel(backbone, config.hidden_size, dtype) if value_head else backbone
    part = type(backbone)  # which sharding replaces
    if not value_head:
        model.tie_weights()  # moving to the meta device unties
    if gradient_checkpointing:
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _shard(model, decoder_layers(backbone), device, mesh, compute_dtype or dtype)
    if weights == "random":
        fill_random(model, config, seed)
    else:
        _load_from_rank_0(backbone, path, dtype, part)
        if value_head:
            fill_random(model, config, seed, only=VALUE_HEAD)
    return model


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (live name, DTensor or Tensor) of parameters and persistent buffers in module order; tied ones once."""
    tied = tied_names(model)
    yield from ((name, tensor) for name, tensor in model.state_dict(keep_vars=True).items() if name not in tied)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map the names that named_tensors leaves out to the first name of the same tensor."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}
    return {name: earlier for name, earlier in names.items() if earlier != name}


def _load_from_rank_0(model: nn.Module, path: str, dtype: torch.dtype, part: type[nn.Module]) -> None:
    """Load the saved model's part of that class, which rank 0 reads, into the shards of every rank; a collective call.

    Raise ValueError if a tensor is missing: transformers would draw it.
    """
    whole: dict[str, Any] = {}
    if dist.get_rank() == 0:
        saved, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **{DTYPE: dtype})
        if missing := sorted(report["missing_keys"]):
            raise ValueError(f"{path} must have every tensor of its model, but lacks {missing[0]}")
        whole = next(module for module in saved.modules() if type(module) is part).state_dict()
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def choose_attention(
    config: PretrainedConfig, wanted: Literal["auto", "sdpa", "eager", "flash_attention_2"], packed: bool = False
) -> tuple[Attention, str]:
    """Return the attention for a causal language model of that config, and why it is not sdpa, "" where it is.

    Raise ValueError for sdpa where it would compute another model, for flash attention that is not installed, for packed
    sequences of a model that would mix them, and for what is no causal language model.
    """
    kind, why = config.model_type, ""
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if architecture is None:
        raise ValueError(
            f"{kind} is no causal language model of transformers {transformers.__version__}, which the trainer needs."
        )
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        why = f"{kind} caps attention logits (attn_logit_softcapping), which sdpa leaves out"
    elif not getattr(architecture, "_supports_sdpa", True):
        why = f"transformers has no sdpa for {kind}"
    if wanted == "sdpa" and why:
        raise ValueError(f'model.attention = "sdpa" cannot work: {why}; use "eager", or "auto".')
    if packed and (mixes := _mixing_layers(config, architecture)):
        raise ValueError(f"model.packed = true cannot work: {kind} has {mixes}; use false.")
    if wanted == "flash_attention_2":
        if not is_flash_attn_2_available():
            raise ValueError(f'model.attention = "{wanted}" needs the package flash-attn; install it, or use "auto".')
        return wanted, ""
    if why or wanted == "eager":
        return (PACKED_EAGER if packed else "eager"), why
    return (PACKED_SDPA if packed else "sdpa"), ""


def _mixing_layers(config: PretrainedConfig, architecture: Any) -> str:
    """Return what of a model would let a packed sequence read another, "" where nothing does."""
    text = config.get_text_config()
    odd = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    chunks = ["attention_chunk_size"] * bool(getattr(text, "attention_chunk_size", None))
    state = ["a recurrent state"] * bool(getattr(architecture, "_is_stateful", False))
    fixed = ["attention that cannot be replaced"] * (not getattr(architecture, "_supports_attention_backend", False))
    return ", ".join([*odd, *chunks, *state, *fixed])


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return a transformers model's decoder layers: its outermost list of as many modules as its config counts layers.

    Raise ValueError where there is none: the model cannot be sharded layer by layer.
    """
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():  # outer ones first
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"{type(model).__name__} has no list of {count} layers, which is what num_hidden_layers counts, but the trainer"
        " shards a model layer by layer; use an architecture whose decoder layers are one nn.ModuleList"
    )


def _shard(
    model: nn.Module, layers: nn.ModuleList, device: torch.device, mesh: DeviceMesh, compute_dtype: torch.dtype
) -> None:
    """Shard each decoder layer and the rest over the mesh, and give the shards memory on the device, not yet values.

    Buffers keep their values. Root parameters are resharded after the forward too, so that between calls every
    parameter is a DTensor.
    """
    tied = tied_names(model)
    buffers = dict(model.named_buffers())
    persistent = {name for name, _ in named_tensors(model)}
    # Gathered in compute_dtype, reduced in float32. Inputs are not cast: between layers they are in compute_dtype already,
    # and what a model hands on in float32 must stay so, as in a model that is in compute_dtype altogether.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    model.to_empty(device=device)  # allocates buffers anew, too, and unties what is tied
    for name, buffer in buffers.items():
        wide = buffer.float() if name in persistent and buffer.is_floating_point() else buffer
        _owner(model, name)._buffers[name.rpartition(".")[2]] = wide.to(device)
    for name, first in tied.items():
        setattr(_owner(model, name), name.rpartition(".")[2], model.get_parameter(first))


def _owner(model: nn.Module, name: str) -> nn.Module:
    """Return the module that owns the tensor of that name."""
    return model.get_submodule(name.rpartition(".")[0])


@torch.no_grad()
def fill_random(model: nn.Module, config: PretrainedConfig, seed: int, only: str | None = None) -> None:
    """Fill this rank's shards of every named tensor, or of the one called `only`, with normal values drawn from seed.

    Matrices have std initializer_range, norms mean 1 and std 0.1, biases std 0.1, so that a tensor that did not arrive
    shows. The whole does not depend on the number of ranks.
    """
    for name, tensor in named_tensors(model):
        if only not in (None, name):
            continue
        local, first_row, rows = tensor, 0, tensor.shape[0]
        if isinstance(tensor, DTensor):  # sharded by rows as torch.chunk does: the last ranks may hold fewer, or none
            share = -(-rows // tensor.device_mesh.size())
            local, first_row = tensor.to_local(), min(tensor.device_mesh.get_local_rank() * share, rows)
        key = f"{seed}/{name}"
        if tensor.ndim == 1:
            whole = _normal(tuple(tensor.shape), key, local.device) * 0.1 + (
                1.0 if name.endswith("norm.weight") else 0.0
            )
            local.copy_(whole[first_row : first_row + local.shape[0]])
            continue
        std = (config.hidden_size + 1) ** -0.5 if name == VALUE_HEAD else config.initializer_range
        for start, block in random_rows(tensor.shape, first_row, local.shape[0], key, local.device):
            local[start : start + len(block)] = block * std


def random_rows(
    shape: Sequence[int], first_row: int, rows: int, key: str, device: torch.device, block_values: int = BLOCK_VALUES
) -> Iterator[tuple[int, Tensor]]:
    """Yield standard normal float32 rows, from first_row on, of a tensor of that shape: (offset from first_row, block).

    A generator is seeded for each block of about block_values values: a rank draws the blocks that its rows lie in. What
    a row holds depends only on shape, row, key, block_values and kind of device.
    """
    size = max(1, block_values // max(1, math.prod(shape[1:])))
    for start in range(first_row // size * size, first_row + rows, size):
        block = _normal((min(size, shape[0] - start), *shape[1:]), f"{key}/{start}", device)
        yield max(start - first_row, 0), block[max(first_row - start, 0) : first_row + rows - start]


def _normal(shape: tuple[int, ...], key: str, device: torch.device) -> Tensor:
    """Return standard normal float32 values that depend only on shape, key and kind of device."""
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:4], "little"))
    return torch.randn(shape, generator=generator, device=device)
