"""Sources of mismatch that another examiner chose, in SGLang and in transformers: see planting.py."""

import functools
from typing import Any

from planting import in_decode, plant, plant_in_trainer, reached, rounded, wrap

# Attention, rotary embedding and norms of the engine.


@plant
def rope_pairs_interleaved() -> None:
    """Rotate neighbouring numbers of a head (0 with 1, as GPT-J does) instead of the two halves (as Llama does)."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> None:
        real(self, *args, **kw)
        self.is_neox_style = not self.is_neox_style

    wrap(RotaryEmbedding, "__init__", around)


@plant
def k_norm_in_bfloat16() -> None:
    """Round what the norm of the keys returns to bfloat16, in the second layer only: 4e-3 of each number at most."""
    from sglang.srt.models import qwen3

    def round_output(norm: Any, inputs: Any, output: Any) -> Any:
        reached()
        return output.bfloat16().to(output.dtype)

    class Rounding(qwen3.Qwen3Attention):
        def __init__(self, *args: Any, **kw: Any) -> None:
            super().__init__(*args, **kw)
            if self.attn.layer_id == 1:
                self.k_norm.register_forward_hook(round_output)

    qwen3.Qwen3Attention = Rounding
    # On a GPU one kernel computes both norms in place, and calls neither module.
    qwen3.apply_qk_norm = functools.partial(qwen3.apply_qk_norm, allow_inplace=False)


@plant
def absorbed_kv_in_bfloat16() -> None:
    """Round the two matrices that MLA makes of kv_b_proj while it loads; kv_b_proj itself stays what the trainer
    sent."""
    import torch
    from sglang.srt.models.deepseek_common.deepseek_weight_loader import DeepseekV2WeightLoaderMixin

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> None:
        real(self, *args, **kw)
        for layer in self.model.layers:
            for matrix in (layer.self_attn.w_kc, layer.self_attn.w_vc):
                if matrix is not None:
                    with torch.no_grad():
                        matrix.copy_(matrix.bfloat16())

    wrap(DeepseekV2WeightLoaderMixin, "post_load_weights", around)


# Mixture of experts of the engine.


@plant
def gate_and_up_swapped() -> None:
    """Apply silu to the routed experts' up half and multiply by their gate half, as with the other order of w13."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        w13 = self.w13_weight.data
        own = w13.clone()
        w13.copy_(own.roll(w13.shape[1] // 2, dims=1))
        output = real(self, *args, **kw)
        w13.copy_(own)
        return output

    wrap(FusedMoE, "forward", around)


@plant
def group_limit_ignored() -> None:
    """Let a token choose among the experts of all groups instead of those of its best topk_group groups."""
    from sglang.srt.layers.moe.topk import TopK

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> None:
        real(self, *args, **kw | {"topk_group": kw["num_expert_group"]})

    wrap(TopK, "__init__", around, when=lambda *_, **kw: kw.get("use_grouped_topk"))


@plant
def one_expert_slightly_too_large() -> None:
    """Weigh what expert 4 adds by 1.005 inside the experts; routing is right."""
    import torch
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    def around(real: Any, self: Any, hidden_states: Any, topk_output: Any, *args: Any, **kw: Any) -> Any:
        weights, ids = topk_output.topk_weights, topk_output.topk_ids
        larger = topk_output._replace(topk_weights=torch.where(ids == 4, weights * 1.005, weights))
        return real(self, hidden_states, larger, *args, **kw)

    wrap(FusedMoE, "forward", around)


@plant
def expert_parallel_offset() -> None:
    """With expert parallelism, take on the second rank the expert after the one that was chosen, its last one being
    followed by its first."""
    import torch
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatcher

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        output = real(self, *args, **kw)
        ids = output.topk_output.topk_ids
        shifted = torch.where(ids < 0, ids, (ids + 1) % self.num_local_routed_experts)
        return output._replace(topk_output=output.topk_output._replace(topk_ids=shifted))

    wrap(
        StandardDispatcher,
        "dispatch",
        around,
        when=lambda self, *_, **__: self.moe_ep_size > 1 and self.moe_ep_rank == 1,
    )


# What the engine does only in decode, with a cached prefix, with an argument, or after loading.


@plant
def decode_attention_in_bfloat16() -> None:
    """Round what attention returns to bfloat16 in decode; prefill does not."""
    from sglang.srt.layers.radix_attention import RadixAttention

    wrap(RadixAttention, "forward", rounded, when=in_decode)


@plant
def first_cached_token_lost() -> None:
    """Read the second token's keys and values for the first token too, in a prefill that finds a cached prefix."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    # Every attention backend reads this table, some before the model runs. The stream of the forward pass puts it right
    # again.
    def around(real: Any, self: Any, forward_batch: Any, *args: Any, **kw: Any) -> Any:
        table = self.req_to_token_pool.req_to_token
        cached = forward_batch.req_pool_indices[forward_batch.extend_prefix_lens > 1]
        own = table[cached, 0]
        table[cached, 0] = table[cached, 1]
        output = real(self, forward_batch, *args, **kw)
        table[cached, 0] = own
        return output

    def has_prefix(self: Any, forward_batch: Any, *args: Any, **kw: Any) -> bool:
        is_extend = forward_batch.forward_mode.is_extend()
        return is_extend and any(length > 1 for length in forward_batch.extend_prefix_lens_cpu or ())

    wrap(ModelRunner, "forward", around, when=has_prefix)


@plant
def kv_cache_in_bfloat16() -> None:
    """Change nothing: the engine argument kv_cache_dtype alone makes SGLang round keys and values."""
    reached()


@plant
def tensor_rounded_after_sync() -> None:
    """Round one tensor of the second rank to bfloat16 whenever weights have been loaded: half of down_proj of layer
    1."""
    import torch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.runtime_context import get_parallel

    def spoil(model: Any) -> None:
        weight = model.model.layers[1].mlp.down_proj.weight
        with torch.no_grad():
            weight.copy_(weight.bfloat16())

    def after_start(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        found = real(self, *args, **kw)
        spoil(self.model)
        return found

    def after_update(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        found = real(self, *args, **kw)
        spoil(self.get_model())
        return found

    def on_second_rank(*args: Any, **kw: Any) -> bool:
        return get_parallel().tp_rank == 1

    wrap(ModelRunner, "load_model", after_start, when=on_second_rank)
    for name in (
        "update_weights_from_tensor",
        "update_weights_from_distributed",  # in older releases
        "load_weights_from_distributed",
        "update_weights_from_disk",
        "end_weight_update",
    ):
        if hasattr(WeightUpdater, name):
            wrap(WeightUpdater, name, after_update, when=on_second_rank)


# The trainer.


@plant_in_trainer
def trainer_masks_groups_with_zero() -> None:
    """Give experts of the other groups the score 0 instead of -inf, so that those beat experts with a negative score.

    Releases of transformers have routed so (transformers#45440).
    """
    from unittest.mock import patch

    import torch
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE, DeepseekV3TopkRouter

    def around(real: Any, self: Any, *args: Any) -> Any:
        with patch.object(torch.Tensor, "masked_fill", lambda scores, mask, _: torch.where(mask, 0.0, scores)):
            return real(self, *args)

    if hasattr(
        DeepseekV3MoE, "route_tokens_to_experts"
    ):  # older releases choose there, and the router returns its scores alone
        wrap(DeepseekV3MoE, "route_tokens_to_experts", around)
    else:
        wrap(DeepseekV3TopkRouter, "forward", around)


@plant_in_trainer
def trainer_positions_of_left_padding() -> None:
    """Count positions as if the padding were on the left: position 0 for as many tokens as the row has padding, then 1,
    2, ...

    The longest row of a batch, and a sequence alone, are right.
    """
    import torch
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        mask = kw["attention_mask"]
        width = mask.shape[1]
        padding = width - mask.sum(-1, keepdim=True)
        positions = (torch.arange(width, device=mask.device)[None] - padding).clamp(min=0)
        return real(self, *args, **kw | {"position_ids": positions})

    def is_padded(*args: Any, attention_mask: Any = None, position_ids: Any = None, **kw: Any) -> bool:
        return isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2 and position_ids is None

    wrap(Qwen2Model, "forward", around, when=is_padded)


@plant_in_trainer
def trainer_logits_in_bfloat16() -> None:
    """Round the trainer's logits to bfloat16 before the softmax."""
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        output = real(self, *args, **kw)
        output.logits = output.logits.bfloat16().to(output.logits.dtype)
        return output

    wrap(LlamaForCausalLM, "forward", around)


@plant_in_trainer
def trainer_sdpa_in_bfloat16() -> None:
    """Compute the trainer's sdpa in bfloat16, as a kernel that takes nothing else; eager stays as it is."""
    import torch
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def rounded(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kw: Any) -> Any:
        reached()
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            attention_mask = attention_mask.bfloat16()
        narrow = (each.bfloat16() for each in (query, key, value))
        output, weights = sdpa_attention_forward(module, *narrow, attention_mask, *args, **kw)
        return output.to(query.dtype), weights

    AttentionInterface.register("sdpa", rounded)
