"""Rules for model.rollout_precision = "fp8_block": what SGLang's block-FP8 layers refuse, and engines that quantize
themselves.

The sizes follow Fp8LinearMethod.validate_block_quant_shapes and Fp8MoEMethod of sglang 0.5.23: no rank's share of a
matrix may end inside a block, and matrices that SGLang fuses must each be whole blocks.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from harness.config.facts import Device, SGLangFacts
from harness.config.precision import FP8_BLOCK
from harness.config.rules import BrokenRule
from harness.config.schema import Config

BLOCK = FP8_BLOCK.block[0]
"""Rows of a block, which has as many columns."""
LIKE_LLAMA = ("llama", "mistral", "ministral3", "phi3", "internlm3")
"""model_type of models that SGLang serves with its Llama class, or with one made from it."""
REMEDY = f"SGLang's block-FP8 layers take whole blocks of {BLOCK} x {BLOCK} alone"


def fp8_rules(config: Config, device: Device | None) -> Iterator[BrokenRule]:
    """Yield what is wrong with a quantized precision with any model."""
    precision = config.model.precision
    if not precision.quantized:
        return
    if precision.computed != precision.quantized.computed:
        why = (
            f'for model.rollout_precision = "{precision.of_engine}", since SGLang computes with FP8 weights in 16 bits'
        )
        yield BrokenRule("model.dtype", f'must be "{precision.quantized.computed}" {why}')
    # SGLang draws its dummy weights for the scales of the KV cache too. Each sync sets these to 1, but CUDA graphs keep
    # the numbers with which they were captured.
    graphs = config.engine.args.get("disable_cuda_graph", config.engine.preset != "sglang") is False
    if device == "cuda" and config.engine.initial_weights == "dummy" and graphs:
        why = "dummy weights make the scales of the KV cache random, and CUDA graphs would keep them"
        yield BrokenRule(
            "engine.initial_weights", f'{why}; use engine.initial_weights = "checkpoint", or no CUDA graphs'
        )


def fp8_model(config: Config, sizes: Mapping[str, Any], sglang: SGLangFacts | None) -> Iterator[BrokenRule]:
    """Yield why SGLang cannot load this model in block-FP8. sizes: the model's config."""
    if config.model.precision.quantized is not FP8_BLOCK:
        return
    kind = sizes.get("model_type")
    if kind in LIKE_LLAMA and sglang and not sglang.loads_block_scales_of_llama:
        why = f"sglang {sglang.version} loads no block scales of a {kind} model, as it takes them for scales of whole tensors"
        yield BrokenRule(
            "model.rollout_precision", f'{why} (sglang#30234); use "same", or another model', unsupported=True
        )
    yield from fp8_sizes(config, sizes)


def fp8_sizes(config: Config, sizes: Mapping[str, Any]) -> Iterator[BrokenRule]:
    """Yield each size of the model that ends inside a block. sizes: the model's config; a rule without its field is
    skipped.
    """
    ranks = _Ranks(config)
    for words, size, over in (*_dense(sizes, ranks), *_attention(sizes, ranks), *_experts(sizes, ranks)):
        if size and (size % over or size // over % BLOCK):
            divided = f" over {over} ranks" if over > 1 else ""
            multiple = f"a multiple of {BLOCK}{f' x {over} = {BLOCK * over}' if over > 1 else ''}"
            yield BrokenRule("model.rollout_precision", f"{words} {size}{divided}, which must be {multiple}: {REMEDY}")


class _Ranks:
    """Over how many ranks an engine divides each kind of matrix."""

    def __init__(self, config: Config) -> None:
        arguments, tp = config.engine.args, config.parallel.tp
        self.dense = arguments.get("moe_dense_tp_size") or tp
        shares = arguments.get("dp_size") if arguments.get("enable_dp_attention") else 1
        self.attention = tp // shares if type(shares) is int and 0 < shares <= tp else tp
        ep = arguments.get("ep_size") or arguments.get("expert_parallel_size") or 1
        self.experts = tp // ep if type(ep) is int and 0 < ep <= tp else tp


_Size = tuple[str, int, int]
"""What it is, how large, and over how many ranks it is divided."""


def _number(sizes: Mapping[str, Any], *names: str) -> int:
    found = (sizes.get(name) for name in names)
    return next((value for value in found if type(value) is int and value > 0), 0)


def _dense(sizes: Mapping[str, Any], ranks: _Ranks) -> Iterator[_Size]:
    yield "the model's hidden size is", _number(sizes, "hidden_size"), 1
    experts = _number(sizes, "n_routed_experts", "num_local_experts", "num_experts")
    # A mixture of experts has dense layers only where its config says so.
    has_dense = not experts or _number(sizes, "first_k_dense_replace") or sizes.get("mlp_only_layers")
    if has_dense or _number(sizes, "decoder_sparse_step") > 1:
        yield "the model's intermediate size is", _number(sizes, "intermediate_size"), ranks.dense


def _attention(sizes: Mapping[str, Any], ranks: _Ranks) -> Iterator[_Size]:
    heads, over = _number(sizes, "num_attention_heads"), ranks.attention
    if _number(sizes, "kv_lora_rank"):
        yield from _latent_attention(sizes, heads, over)
        return
    width = _number(sizes, "head_dim") or _number(sizes, "hidden_size") // max(heads, 1)
    kv_heads = _number(sizes, "num_key_value_heads") or heads
    yield "the model's queries (heads x head_dim) have the size", heads * width, over
    # Fewer key-value heads than ranks are replicated: each rank has one.
    name = "the model's keys (key-value heads x head_dim) have the size"
    yield name, max(kv_heads, over) * width, over


def _latent_attention(sizes: Mapping[str, Any], heads: int, over: int) -> Iterator[_Size]:
    nope, rope, value = (_number(sizes, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    yield "the model's q_lora_rank, which SGLang fuses with kv_a, is", _number(sizes, "q_lora_rank"), 1
    yield "the model's kv_lora_rank is", _number(sizes, "kv_lora_rank"), 1
    if over > 1:
        yield "the model's queries (heads x (qk_nope + qk_rope)) have the size", heads * (nope + rope), over
        yield "the model's kv_b_proj (heads x (qk_nope + v)) has the size", heads * (nope + value), over
        yield "the model's values (heads x v_head_dim) have the size", heads * value, over


def _experts(sizes: Mapping[str, Any], ranks: _Ranks) -> Iterator[_Size]:
    width = _number(sizes, "moe_intermediate_size", "intermediate_size")
    if not _number(sizes, "n_routed_experts", "num_local_experts", "num_experts"):
        return
    yield "an expert's intermediate size is", width, ranks.experts
    shared = _number(sizes, "n_shared_experts")
    yield "the shared experts' intermediate size is", width * shared, ranks.dense
    yield "the shared expert's intermediate size is", _number(sizes, "shared_expert_intermediate_size"), ranks.dense
