"""How many weights each layer of a causal language model has, from the fields of its config.json.

Counts matrices only: norms, biases and buffers are less than 0.1 % of a model. Needs no torch, so that --dry-run answers at
once on any Python; the tests compare with real models on the meta device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Fields = Mapping[str, Any]
KINDS = ("qwen2", "qwen3", "llama", "qwen3_moe", "deepseek_v3")


class UnknownShape(ValueError):
    """The model is not on this machine, or its architecture or sizes are not known here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """The elements of one decoder layer, by how tensor-parallel ranks of SGLang share them."""

    split: int
    """Cut by attention heads or by the intermediate size, so that each rank has 1 / tp."""
    key_value: int
    """Key and value projections: cut by key-value heads; each rank has at least one."""
    whole: int
    """On every rank: routers, and MLA's projections to a low rank."""
    absorbed: int
    """Part of `split` that SGLang keeps a second time: kv_b_proj of MLA."""
    router: int
    """Part of `whole` that block-FP8 leaves as it is."""
    experts: int
    """Routed experts, cut like `split`. FSDP2 cuts them by expert."""

    @property
    def elements(self) -> int:
        return self.split + self.key_value + self.whole + self.experts

    @property
    def quantized(self) -> int:
        """Elements that block-FP8 has in 8 bits, `absorbed` counted once."""
        return self.elements - self.router


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A model's layers, and the sizes that decide how ranks share them."""

    layers: tuple[LayerShape, ...]
    hidden_size: int
    vocab_size: int
    is_tied: bool
    """The head is the embedding."""
    kv_heads: int
    kv_width: int
    """Elements of KV cache for one token, in one layer: of one key-value head (key and value), or all of them under MLA."""
    is_mla: bool
    experts: int

    @property
    def parameters(self) -> int:
        """Return the elements of all matrices."""
        vocabulary = self.vocab_size * self.hidden_size
        return sum(layer.elements for layer in self.layers) + vocabulary * (1 if self.is_tied else 2)


def model_shape(fields: Fields) -> ModelShape:
    """Return the model's shape. Raise UnknownShape for an architecture other than KINDS, and for missing or wrong sizes."""
    if fields.get("architectures") == ["DeepseekV3ForCausalLM"]:  # such as Kimi-K2, whose model_type is its own
        fields = {**fields, "model_type": "deepseek_v3"}
    kind = fields.get("model_type")
    if kind not in KINDS:
        raise UnknownShape(f'model_type must be one of {", ".join(KINDS)} to know its weights, got "{kind}"')
    try:
        is_mla = kind == "deepseek_v3"
        return ModelShape(
            layers=tuple(_layer(fields, index) for index in range(fields["num_hidden_layers"])),
            hidden_size=fields["hidden_size"],
            vocab_size=fields["vocab_size"],
            is_tied=bool(fields.get("tie_word_embeddings", False)),
            kv_heads=_kv_heads(fields),
            kv_width=fields["kv_lora_rank"] + fields["qk_rope_head_dim"] if is_mla else 2 * _head_dim(fields),
            is_mla=is_mla,
            experts=_experts(fields),
        )
    except KeyError as missing:
        raise UnknownShape(
            f"the config of a {kind} model has no {missing.args[0]}, so its shape is not known"
        ) from None
    except (TypeError, ZeroDivisionError) as error:
        raise UnknownShape(f"the config of a {kind} model has sizes that no tensor can have ({error})") from None


def _layer(fields: Fields, index: int) -> LayerShape:
    hidden = fields["hidden_size"]
    attention, key_value, whole, absorbed = _latent(fields) if "kv_lora_rank" in fields else _grouped(fields)
    if not _is_sparse(fields, index):
        split = attention + 3 * hidden * fields["intermediate_size"]
        return LayerShape(split=split, key_value=key_value, whole=whole, absorbed=absorbed, router=0, experts=0)
    expert = 3 * hidden * fields["moe_intermediate_size"]
    count = _experts(fields)
    router = count * hidden
    return LayerShape(
        split=attention + expert * (fields.get("n_shared_experts") or 0),
        key_value=key_value,
        whole=whole + router,
        absorbed=absorbed,
        router=router,
        experts=count * expert,
    )


def _grouped(fields: Fields) -> tuple[int, int, int, int]:
    """Grouped-query attention: split, key_value, whole and absorbed."""
    hidden, head_dim = fields["hidden_size"], _head_dim(fields)
    return 2 * hidden * fields["num_attention_heads"] * head_dim, 2 * hidden * _kv_heads(fields) * head_dim, 0, 0


def _latent(fields: Fields) -> tuple[int, int, int, int]:
    """Multi-head latent attention (arXiv 2405.04434); without q_lora_rank queries are projected in one step."""
    hidden, heads, rank = fields["hidden_size"], fields["num_attention_heads"], fields["kv_lora_rank"]
    nope, rope, value = fields["qk_nope_head_dim"], fields["qk_rope_head_dim"], fields["v_head_dim"]
    query_rank = fields["q_lora_rank"]
    absorbed = heads * (nope + value) * rank
    split = heads * (nope + rope) * (query_rank or hidden) + absorbed + hidden * heads * value
    return split, 0, hidden * ((query_rank or 0) + rank + rope), absorbed


def _is_sparse(fields: Fields, index: int) -> bool:
    if fields["model_type"] == "deepseek_v3":
        return bool(index >= fields["first_k_dense_replace"])
    if fields["model_type"] != "qwen3_moe" or index in (fields.get("mlp_only_layers") or ()):
        return False
    return bool((index + 1) % fields["decoder_sparse_step"] == 0)


def _experts(fields: Fields) -> int:
    """Return the routed experts of a layer, 0 without any; transformers 5 saves Qwen3-MoE's as num_local_experts."""
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    return next((fields[name] for name in names if name in fields), 0)


def _head_dim(fields: Fields) -> int:
    return fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]


def _kv_heads(fields: Fields) -> int:
    return fields.get("num_key_value_heads") or fields["num_attention_heads"]
