"""Every tensor of a causal language model by name and shape, from the fields of its config.

Names and shapes are those that transformers 5 gives the model in memory, where a layer's routed experts are two tensors;
the order is that of its state_dict. How SGLang cuts each over tensor-parallel ranks stands beside it.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.task.architectures import is_tiny
from harness.task.tiny_models import Device, tiny_fields

Cut = Literal["whole", "heads", "kv_heads", "width", "experts", "vocab"]
"""What of a tensor SGLang deals out to tensor-parallel ranks: attention heads, key-value heads (at least one a rank),
an intermediate size, experts or their intermediate size, the padded vocabulary; or every rank holds the whole."""

Fields = Mapping[str, Any]


_OTHER_SIZES = {
    "num_key_value_heads", "head_dim", "moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts",
    "n_shared_experts", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
}  # fmt: skip


class UnknownShape(ValueError):
    """The config is not at hand, or of an architecture or with fields that are not known here."""


@dataclass(frozen=True, slots=True)
class TensorShape:
    """One tensor. layer: its decoder layer, None outside of them. buffers are float32 and never sharded."""

    name: str
    shape: tuple[int, ...]
    cut: Cut
    layer: int | None = None
    is_buffer: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model: its tensors in state_dict order, and the numbers by which an engine cuts them."""

    tensors: tuple[TensorShape, ...]
    hidden_size: int
    layers: int
    vocab_size: int
    heads: int
    kv_heads: int
    kv_width: int
    """Elements of KV cache of one token in one layer: of one key-value head (key and value), or all of them under MLA."""
    is_mla: bool
    width: int
    """Intermediate size of a dense MLP."""
    experts: int = 0
    expert_width: int = 0

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(tensor.numel for tensor in self.tensors if not tensor.is_buffer)

    @property
    def buffers(self) -> int:
        """Elements of all persistent buffers."""
        return sum(tensor.numel for tensor in self.tensors if tensor.is_buffer)

    @property
    def largest_layer(self) -> int:
        """Elements of the decoder layer that has most."""
        *layers, _ = self.groups()
        return max(sum(tensor.numel for tensor in layer) for layer in layers)

    def groups(self, head: bool = True) -> Iterator[tuple[TensorShape, ...]]:
        """As FSDP2 gathers them: the tensors of each decoder layer, then the rest; without the head, a value model's."""
        by_layer: dict[int | None, list[TensorShape]] = {}
        for tensor in self.tensors:
            by_layer.setdefault(tensor.layer, []).append(tensor)
        rest = [tensor for tensor in by_layer.pop(None) if head or tensor.name != LM_HEAD]
        if not head:
            rest.append(TensorShape("value_head.weight", (1, self.hidden_size), "whole"))
        yield from (tuple(tensors) for tensors in by_layer.values())
        yield tuple(rest)


LM_HEAD = "lm_head.weight"


def model_fields(name: str, shape: Fields, device: Device) -> Fields:
    """The config's fields of a tiny model with `shape` over them, or of config.json in the folder `name`.

    Raises UnknownShape for a hub id, whose config this machine may not have.
    """
    if is_tiny(name):
        model_type = "deepseek_v3" if name == "moonlight" else name
        return {"model_type": model_type} | tiny_fields(name, device) | dict(shape)
    file = Path(name) / "config.json"
    if not file.is_file():
        raise UnknownShape(f'model.name = "{name}" is no folder with a config.json here, so its shape is not known')
    fields: Fields = json.loads(file.read_text(encoding="utf-8"))
    return fields


def model_shape(fields: Fields) -> ModelShape:
    """Raises UnknownShape for an architecture other than those of harness/task/tiny_models.py, and for a missing field."""
    kind = fields.get("model_type")
    if kind not in _ATTENTION:
        raise UnknownShape(f'model_type "{kind}" is not one whose tensors are known here: {", ".join(_ATTENTION)}')
    try:
        return _model_shape(fields)
    except KeyError as missing:
        raise UnknownShape(
            f"the config of a {kind} model has no {missing.args[0]}, so its shape is not known"
        ) from None
    except (TypeError, ZeroDivisionError) as error:
        raise UnknownShape(f"the config of a {kind} model has sizes that no tensor can have ({error})") from None


def _model_shape(fields: Fields) -> ModelShape:
    for name in ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads"):
        _check_size(name, fields[name])
    for name in _OTHER_SIZES & fields.keys():
        if fields[name] is not None:
            _check_size(name, fields[name])
    hidden, vocab, layers = fields["hidden_size"], fields["vocab_size"], fields["num_hidden_layers"]
    heads = fields["num_attention_heads"]
    is_mla = fields["model_type"] == "deepseek_v3"
    tensors = [TensorShape("model.embed_tokens.weight", (vocab, hidden), "vocab")]
    for layer in range(layers):
        parts = [
            *_ATTENTION[fields["model_type"]](fields),
            *_mlp(fields, layer),
            ("input_layernorm.weight", (hidden,), "whole"),
            ("post_attention_layernorm.weight", (hidden,), "whole"),
        ]
        tensors += [
            TensorShape(f"model.layers.{layer}.{name}", shape, cut, layer, name.endswith("e_score_correction_bias"))
            for name, shape, cut in parts
        ]
    tensors.append(TensorShape("model.norm.weight", (hidden,), "whole"))
    if not fields.get("tie_word_embeddings", False):
        tensors.append(TensorShape(LM_HEAD, (vocab, hidden), "vocab"))
    return ModelShape(
        tensors=tuple(tensors),
        hidden_size=hidden,
        layers=layers,
        vocab_size=vocab,
        heads=heads,
        kv_heads=_kv_heads(fields),
        kv_width=fields["kv_lora_rank"] + fields["qk_rope_head_dim"] if is_mla else 2 * _head_dim(fields),
        is_mla=is_mla,
        width=fields["intermediate_size"],
        experts=_experts(fields),
        expert_width=fields["moe_intermediate_size"] if _experts(fields) else 0,
    )


def _check_size(name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise TypeError(f"{name} = {value!r}")


Part = tuple[str, tuple[int, ...], Cut]


def _head_dim(fields: Fields) -> int:
    return fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]


def _kv_heads(fields: Fields) -> int:
    return fields.get("num_key_value_heads") or fields["num_attention_heads"]


def _experts(fields: Fields) -> int:
    """Routed experts of a layer; transformers 5 calls Qwen3-MoE's num_local_experts when it saves a config."""
    kind = fields["model_type"]
    if kind == "qwen3_moe":
        return fields["num_local_experts"] if "num_local_experts" in fields else fields["num_experts"]
    return fields["n_routed_experts"] if kind == "deepseek_v3" else 0


def _grouped_query(fields: Fields, bias: bool, output_bias: bool, norms: bool) -> Iterator[Part]:
    hidden, head_dim = fields["hidden_size"], _head_dim(fields)
    wide, narrow = fields["num_attention_heads"] * head_dim, _kv_heads(fields) * head_dim
    for name, size, cut in (("q_proj", wide, "heads"), ("k_proj", narrow, "kv_heads"), ("v_proj", narrow, "kv_heads")):
        yield from _linear(f"self_attn.{name}", size, hidden, cut, cut if bias else None)  # type: ignore[arg-type]
    yield from _linear("self_attn.o_proj", hidden, wide, "heads", "whole" if output_bias else None)
    if norms:
        yield "self_attn.q_norm.weight", (head_dim,), "whole"
        yield "self_attn.k_norm.weight", (head_dim,), "whole"


def _qwen2(fields: Fields) -> Iterator[Part]:
    return _grouped_query(fields, bias=True, output_bias=False, norms=False)


def _llama(fields: Fields) -> Iterator[Part]:
    bias = fields.get("attention_bias", False)
    return _grouped_query(fields, bias, bias, norms=False)


def _qwen3(fields: Fields) -> Iterator[Part]:
    bias = fields.get("attention_bias", False)
    return _grouped_query(fields, bias, bias, norms=True)


def _latent(fields: Fields) -> Iterator[Part]:
    """Multi-head latent attention (arXiv 2405.04434); q_lora_rank None: queries are projected in one step."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    nope, rope, value = fields["qk_nope_head_dim"], fields["qk_rope_head_dim"], fields["v_head_dim"]
    rank, query_rank = fields["kv_lora_rank"], fields["q_lora_rank"]
    bias: Cut | None = "whole" if fields.get("attention_bias", False) else None
    if query_rank is None:
        yield from _linear("self_attn.q_proj", heads * (nope + rope), hidden, "heads")
    else:
        yield from _linear("self_attn.q_a_proj", query_rank, hidden, "whole", bias)
        yield "self_attn.q_a_layernorm.weight", (query_rank,), "whole"
        yield from _linear("self_attn.q_b_proj", heads * (nope + rope), query_rank, "heads")
    yield from _linear("self_attn.kv_a_proj_with_mqa", rank + rope, hidden, "whole", bias)
    yield "self_attn.kv_a_layernorm.weight", (rank,), "whole"
    yield from _linear("self_attn.kv_b_proj", heads * (nope + value), rank, "heads")
    yield from _linear("self_attn.o_proj", hidden, heads * value, "heads", bias)


_ATTENTION: dict[str, Callable[[Fields], Iterator[Part]]] = {
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "llama": _llama,
    "qwen3_moe": _qwen3,
    "deepseek_v3": _latent,
}


def _mlp(fields: Fields, layer: int) -> Iterator[Part]:
    hidden, experts = fields["hidden_size"], _experts(fields)
    if not _is_sparse(fields, layer):
        yield from _gated(fields, "mlp", fields["intermediate_size"])
        return
    width = fields["moe_intermediate_size"]
    yield "mlp.experts.gate_up_proj", (experts, 2 * width, hidden), "experts"
    yield "mlp.experts.down_proj", (experts, hidden, width), "experts"
    yield "mlp.gate.weight", (experts, hidden), "whole"
    if fields["model_type"] == "deepseek_v3":
        yield "mlp.gate.e_score_correction_bias", (experts,), "whole"
        yield from _gated(fields, "mlp.shared_experts", width * fields["n_shared_experts"])


def _is_sparse(fields: Fields, layer: int) -> bool:
    kind = fields["model_type"]
    if kind == "deepseek_v3":
        return bool(layer >= fields["first_k_dense_replace"])
    if kind != "qwen3_moe" or layer in (fields.get("mlp_only_layers") or ()):
        return False
    return bool(_experts(fields) > 0 and (layer + 1) % fields["decoder_sparse_step"] == 0)


def _gated(fields: Fields, module: str, width: int) -> Iterator[Part]:
    hidden = fields["hidden_size"]
    bias = fields["model_type"] == "llama" and fields.get("mlp_bias", False)
    yield from _linear(f"{module}.gate_proj", width, hidden, "width", "width" if bias else None)
    yield from _linear(f"{module}.up_proj", width, hidden, "width", "width" if bias else None)
    yield from _linear(f"{module}.down_proj", hidden, width, "width", "whole" if bias else None)


def _linear(module: str, outputs: int, inputs: int, cut: Cut, bias: Cut | None = None) -> Iterator[Part]:
    yield f"{module}.weight", (outputs, inputs), cut
    if bias:
        yield f"{module}.bias", (outputs,), bias
