"""Every tensor of a causal language model by name and shape, from the fields of its config.json.

As transformers 5 has them in memory, where a layer's routed experts are two tensors, in the order of its state_dict. Why not
a model on the meta device: --dry-run answers for 512 ranks of DeepSeek-V3 671B in a third of a second, on a Python that has
neither torch nor transformers. The tests compare with models on that device.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.tools.tiny_models import Device, is_tiny, tiny_fields

Cut = Literal["whole", "heads", "kv_heads", "width", "experts", "vocab"]
"""What of a tensor SGLang spreads over tensor-parallel ranks: attention heads, key-value heads (at least one a rank), an
intermediate size, experts or their intermediate size, the padded vocabulary; whole: every rank has all of it."""
Fields = Mapping[str, Any]
Part = tuple[str, tuple[int, ...], Cut]

KINDS = ("qwen2", "qwen3", "llama", "qwen3_moe", "deepseek_v3")
LM_HEAD = "lm_head.weight"
NEEDED_SIZES = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads")
OTHER_SIZES = (
    "num_key_value_heads", "head_dim", "moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts",
    "n_shared_experts", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip


class UnknownShape(ValueError):
    """The config is not at hand, or its architecture or fields are not known here."""


@dataclass(frozen=True, slots=True)
class TensorShape:
    """One tensor. layer: its decoder layer, None outside of them. Buffers are float32 and never sharded."""

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
    kv_heads: int
    kv_width: int
    """Elements of KV cache of one token in one layer: of one key-value head (key and value), or all of them under MLA."""
    is_mla: bool
    experts: int

    @property
    def parameters(self) -> int:
        """Return the elements of all parameters."""
        return sum(tensor.numel for tensor in self.tensors if not tensor.is_buffer)

    @property
    def buffers(self) -> int:
        """Return the elements of all persistent buffers."""
        return sum(tensor.numel for tensor in self.tensors if tensor.is_buffer)

    def groups(self, head: bool = True) -> list[list[TensorShape]]:
        """Return what FSDP2 gathers at once: each decoder layer, then the rest; without the head, a value model's."""
        by_layer: dict[int | None, list[TensorShape]] = {}
        for tensor in self.tensors:
            by_layer.setdefault(tensor.layer, []).append(tensor)
        rest = [tensor for tensor in by_layer.pop(None) if head or tensor.name != LM_HEAD]
        value_head = [] if head else [TensorShape("value_head.weight", (1, self.hidden_size), "whole")]
        return [*by_layer.values(), rest + value_head]


def model_fields(name: str, overrides: Fields, device: Device) -> Fields:
    """Return the config's fields of a tiny model with overrides, or those of config.json in the folder `name`.

    Raises UnknownShape for a hub id, whose config this machine may not have.
    """
    if is_tiny(name):
        model_type = "deepseek_v3" if name == "moonlight" else name
        return {"model_type": model_type} | tiny_fields(name, device) | dict(overrides)
    file = Path(name) / "config.json"
    if not file.is_file():
        raise UnknownShape(f'model.name = "{name}" is no folder with a config.json here, so its shape is not known')
    fields: Fields = json.loads(file.read_text(encoding="utf-8"))
    return fields


def model_shape(fields: Fields) -> ModelShape:
    """Return the model's shape; raise UnknownShape for another architecture than KINDS, and for missing or wrong sizes."""
    kind = fields.get("model_type")
    if kind not in KINDS:
        raise UnknownShape(f'model_type must be one of {", ".join(KINDS)} to know its tensors, got "{kind}"')
    try:
        for name in (*NEEDED_SIZES, *(name for name in OTHER_SIZES if fields.get(name) is not None)):
            if not isinstance(fields[name], int) or fields[name] < 1:
                raise TypeError(f"{name} = {fields[name]!r}")
        return _model_shape(fields)
    except KeyError as missing:
        problem = f"no {missing.args[0]}, so its shape is not known"
    except (TypeError, ZeroDivisionError) as error:
        problem = f"sizes that no tensor can have ({error})"
    raise UnknownShape(f"the config of a {kind} model has {problem}")


def _model_shape(fields: Fields) -> ModelShape:
    hidden, vocab, layers = fields["hidden_size"], fields["vocab_size"], fields["num_hidden_layers"]
    is_mla = fields["model_type"] == "deepseek_v3"
    tensors = [TensorShape("model.embed_tokens.weight", (vocab, hidden), "vocab")]
    for layer in range(layers):
        parts: list[Part] = [*(_latent_attention if is_mla else _attention)(fields), *_mlp(fields, layer)]
        parts += [(f"{place}_layernorm.weight", (hidden,), "whole") for place in ("input", "post_attention")]
        for name, shape, cut in parts:
            is_buffer = name.endswith("e_score_correction_bias")
            tensors.append(TensorShape(f"model.layers.{layer}.{name}", shape, cut, layer, is_buffer))
    tensors.append(TensorShape("model.norm.weight", (hidden,), "whole"))
    if not fields.get("tie_word_embeddings", False):
        tensors.append(TensorShape(LM_HEAD, (vocab, hidden), "vocab"))
    return ModelShape(
        tensors=tuple(tensors),
        hidden_size=hidden,
        layers=layers,
        vocab_size=vocab,
        kv_heads=_kv_heads(fields),
        kv_width=fields["kv_lora_rank"] + fields["qk_rope_head_dim"] if is_mla else 2 * _head_dim(fields),
        is_mla=is_mla,
        experts=_experts(fields),
    )


def _head_dim(fields: Fields) -> int:
    return fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]


def _kv_heads(fields: Fields) -> int:
    return fields.get("num_key_value_heads") or fields["num_attention_heads"]


def _experts(fields: Fields) -> int:
    """Return the routed experts of a layer; transformers 5 saves Qwen3-MoE's as num_local_experts."""
    kind = fields["model_type"]
    if kind == "qwen3_moe":
        return fields["num_local_experts"] if "num_local_experts" in fields else fields["num_experts"]
    return fields["n_routed_experts"] if kind == "deepseek_v3" else 0


def _attention(fields: Fields) -> Iterator[Part]:
    """Yield grouped-query attention."""
    kind, hidden, head_dim = fields["model_type"], fields["hidden_size"], _head_dim(fields)
    queries, keys = fields["num_attention_heads"] * head_dim, _kv_heads(fields) * head_dim
    bias = kind != "qwen2" and fields.get("attention_bias", False)
    projections: list[tuple[str, int, Cut]] = [
        ("q", queries, "heads"),
        ("k", keys, "kv_heads"),
        ("v", keys, "kv_heads"),
    ]
    for name, rows, cut in projections:
        yield from _linear(f"self_attn.{name}_proj", rows, hidden, cut, cut if bias or kind == "qwen2" else None)
    yield from _linear("self_attn.o_proj", hidden, queries, "heads", "whole" if bias else None)
    for name in ("q_norm", "k_norm") if kind in ("qwen3", "qwen3_moe") else ():
        yield f"self_attn.{name}.weight", (head_dim,), "whole"


def _latent_attention(fields: Fields) -> Iterator[Part]:
    """Yield multi-head latent attention (arXiv 2405.04434); q_lora_rank None: queries are projected in one step."""
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


def _mlp(fields: Fields, layer: int) -> Iterator[Part]:
    kind, hidden, experts = fields["model_type"], fields["hidden_size"], _experts(fields)
    is_sparse = kind == "deepseek_v3" and layer >= fields["first_k_dense_replace"]
    if kind == "qwen3_moe" and layer not in (fields.get("mlp_only_layers") or ()):
        is_sparse = experts > 0 and (layer + 1) % fields["decoder_sparse_step"] == 0
    if not is_sparse:
        yield from _gated(fields, "mlp", fields["intermediate_size"])
        return
    width = fields["moe_intermediate_size"]
    yield "mlp.experts.gate_up_proj", (experts, 2 * width, hidden), "experts"
    yield "mlp.experts.down_proj", (experts, hidden, width), "experts"
    yield "mlp.gate.weight", (experts, hidden), "whole"
    if kind == "deepseek_v3":
        yield "mlp.gate.e_score_correction_bias", (experts,), "whole"
        yield from _gated(fields, "mlp.shared_experts", width * fields["n_shared_experts"])


def _gated(fields: Fields, module: str, width: int) -> Iterator[Part]:
    hidden, bias = fields["hidden_size"], fields["model_type"] == "llama" and fields.get("mlp_bias", False)
    for name in ("gate_proj", "up_proj"):
        yield from _linear(f"{module}.{name}", width, hidden, "width", "width" if bias else None)
    yield from _linear(f"{module}.down_proj", hidden, width, "width", "whole" if bias else None)


def _linear(module: str, outputs: int, inputs: int, cut: Cut, bias: Cut | None = None) -> Iterator[Part]:
    yield f"{module}.weight", (outputs, inputs), cut
    if bias:
        yield f"{module}.bias", (outputs,), bias
