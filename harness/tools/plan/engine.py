"""What one rank of an SGLang engine holds: weights as SGLang cuts them over tp and pp, and KV cache in what is left.

Rules as of sglang 0.5.20: VocabParallelEmbedding pads the vocabulary to a multiple of 64; key-value heads are repeated
where there are fewer than ranks; norms, routers and MLA's low-rank down projections are whole on every rank; MLA keeps
kv_b_proj a second time, absorbed (w_kc, w_vc); get_pp_indices gives layers that remain to the last stages.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.tools.plan.shapes import LM_HEAD, ModelShape, TensorShape

VOCAB_PADDING = 64
# Arguments that make SGLang cut or store weights in another way than is counted here.
NOT_COUNTED = (
    "quantization", "enable_dp_attention", "dp_size", "speculative_algorithm", "cpu_offload_gb", "enable_lora",
    "ep_num_redundant_experts", "moe_dense_tp_size",
)  # fmt: skip
FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineShare:
    """One pipeline stage's share of each of its ranks, in bytes."""

    stage: int
    first_layer: int
    last_layer: int
    weights: int
    kv_token: int
    """KV cache of one token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLayout:
    """How one engine is cut. expert_ranks: engine.args.ep_size."""

    tp: int
    pp: int
    expert_ranks: int
    weight_bytes: int
    """Of one element."""
    kv_bytes: int
    """Of one element of KV cache."""


def layout_of(tp: int, pp: int, dtype_bytes: int, arguments: Mapping[str, Any]) -> EngineLayout:
    """From the mesh and engine.args."""
    kv_dtype = str(arguments.get("kv_cache_dtype", "auto"))
    kv_bytes = 1 if kv_dtype.startswith("fp8") else 2 if kv_dtype in ("bfloat16", "bf16") else dtype_bytes
    expert_ranks = int(arguments.get("ep_size") or arguments.get("expert_parallel_size") or 1)
    return EngineLayout(tp=tp, pp=pp, expert_ranks=expert_ranks, weight_bytes=dtype_bytes, kv_bytes=kv_bytes)


def stage_layers(layers: int, pp: int) -> list[range]:
    """The decoder layers of each stage; what remains goes to the last ones, one each."""
    base, rest = divmod(layers, pp)
    stages, start = [], 0
    for stage in range(pp):
        size = base + (stage >= pp - rest)
        stages.append(range(start, start + size))
        start += size
    return stages


def engine_shares(model: ModelShape, layout: EngineLayout) -> list[EngineShare]:
    """One for each pipeline stage; all its tp ranks hold as much."""
    shares = []
    for stage, layers in enumerate(stage_layers(model.layers, layout.pp)):
        held = [tensor for tensor in model.tensors if _is_held(tensor, stage, layers, layout.pp)]
        if stage == layout.pp - 1 and layout.pp > 1 and not any(tensor.name == LM_HEAD for tensor in held):
            held.append(model.tensors[0])  # tied: the last stage has a copy of the embedding to compute logits with
        weights = sum(_rank_bytes(tensor, model, layout) for tensor in held)
        kv_heads = 1 if model.is_mla else _share(model.kv_heads, layout.tp)
        kv_token = kv_heads * model.kv_width * len(layers) * layout.kv_bytes
        shares.append(
            EngineShare(
                stage=stage,
                first_layer=layers.start,
                last_layer=layers.stop - 1,
                weights=weights,
                kv_token=kv_token,
            )
        )
    return shares


def not_counted(arguments: Mapping[str, Any]) -> list[str]:
    """Sentences on engine.args whose effect on memory is not counted."""
    return [
        f"engine.args.{name} = {arguments[name]} changes what the engine holds in a way that is not counted here."
        for name in NOT_COUNTED
        if arguments.get(name)
    ]


def _is_held(tensor: TensorShape, stage: int, layers: range, pp: int) -> bool:
    """Embedding on the first stage, norm and head on the last, each layer on its own."""
    if tensor.layer is not None:
        return tensor.layer in layers
    return stage == (0 if tensor.cut == "vocab" and tensor.name != LM_HEAD else pp - 1)


def _rank_bytes(tensor: TensorShape, model: ModelShape, layout: EngineLayout) -> int:
    if tensor.is_buffer:
        return tensor.numel * FLOAT32_BYTES
    copies = 2 if tensor.name.endswith("kv_b_proj.weight") else 1
    return copies * _rank_numel(tensor, model, layout) * layout.weight_bytes


def _rank_numel(tensor: TensorShape, model: ModelShape, layout: EngineLayout) -> int:
    tp = layout.tp
    if tensor.cut == "whole":
        return tensor.numel
    if tensor.cut == "vocab":
        padded = -(-model.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
        return -(-padded // tp) * (tensor.numel // model.vocab_size)
    if tensor.cut == "kv_heads":
        return tensor.numel // model.kv_heads * _share(model.kv_heads, tp)
    # Experts: by number over ep_size ranks, by intermediate size over the others; together tp ways.
    return -(-tensor.numel // tp)


def _share(heads: int, tp: int) -> int:
    return max(1, heads // tp)
