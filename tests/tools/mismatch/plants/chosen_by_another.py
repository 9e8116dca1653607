"""Sources of mismatch that another examiner chose: in SGLang (PLANTS) and in transformers (TRAINER_PLANTS).

PLANT names one of them. SGLang calls `register` in every process of an engine before it builds the model; whoever starts the
trainer calls `register_in_trainer` there, before it builds its model. Nothing of the harness is imported here.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

PLANTS: dict[str, Callable[[], None]] = {}
TRAINER_PLANTS: dict[str, Callable[[], None]] = {}


def register() -> None:
    """Plant what PLANT names in this process of an engine, if it belongs there."""
    PLANTS.get(os.environ.get("PLANT", ""), lambda: None)()


def register_in_trainer() -> None:
    """Plant what PLANT names in this process of the trainer, if it belongs there."""
    TRAINER_PLANTS.get(os.environ.get("PLANT", ""), lambda: None)()


def plant(function: Callable[[], None]) -> Callable[[], None]:
    PLANTS[function.__name__] = function
    return function


def plant_in_trainer(function: Callable[[], None]) -> Callable[[], None]:
    TRAINER_PLANTS[function.__name__] = function
    return function


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method by around(the method, its self, its other arguments)."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def replaced(self: Any, *args: Any, **kw: Any) -> Any:
        return around(real, self, *args, **kw)

    setattr(owner, name, replaced)


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
    from sglang.srt.models.qwen3 import Qwen3Attention

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> None:
        real(self, *args, **kw)
        if self.attn.layer_id == 1:
            norm = self.k_norm
            norm._forward_method = lambda x, *more: norm.forward_native(x, *more).bfloat16().to(x.dtype)

    wrap(Qwen3Attention, "__init__", around)


@plant
def absorbed_kv_in_bfloat16() -> None:
    """Round the two matrices that MLA makes of kv_b_proj while it loads; kv_b_proj itself stays what the trainer sent."""
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
    from sglang.srt.layers.moe import fused_moe_native

    real = fused_moe_native.SiluAndMul

    def swapped() -> Any:
        act = real()
        return lambda gate_up: act(gate_up.roll(gate_up.shape[-1] // 2, dims=-1))

    fused_moe_native.SiluAndMul = swapped


@plant
def group_limit_ignored() -> None:
    """Let a token choose among the experts of all groups instead of those of its best topk_group groups."""
    from sglang.srt.layers.moe.topk import TopK

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> None:
        if kw.get("use_grouped_topk"):
            kw["topk_group"] = kw["num_expert_group"]
        real(self, *args, **kw)

    wrap(TopK, "__init__", around)


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
    """With expert parallelism, take on the second rank the expert after the one that was chosen, its last one being followed by its first."""
    import torch
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatcher

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        output = real(self, *args, **kw)
        if self.moe_ep_size == 1 or self.moe_ep_rank != 1:
            return output
        ids = output.topk_output.topk_ids
        shifted = torch.where(ids < 0, ids, (ids + 1) % self.num_local_routed_experts)
        return output._replace(topk_output=output.topk_output._replace(topk_ids=shifted))

    wrap(StandardDispatcher, "dispatch", around)


# What the engine does only in decode, with a cached prefix, with an argument, or after loading.


@plant
def decode_attention_in_bfloat16() -> None:
    """Round what attention returns to bfloat16 in decode; prefill does not."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    def around(real: Any, self: Any, query: Any, output: Any, *args: Any, **kw: Any) -> Any:
        found = real(self, query, output, *args, **kw)
        return found.copy_(found.bfloat16())

    wrap(TorchNativeAttnBackend, "_run_sdpa_forward_decode", around)


@plant
def first_cached_token_lost() -> None:
    """Read the second token's keys and values for the first token too, in a prefill that finds a cached prefix."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    def around(
        real: Any, self: Any, query: Any, output: Any, keys: Any, values: Any,
        table: Any, rows: Any, lengths: Any, prefixes: Any, *args: Any, **kw: Any,
    ) -> Any:  # fmt: skip
        if (cached := rows[prefixes > 1]).numel():
            table = table.clone()
            table[cached, 0] = table[cached, 1]
        return real(self, query, output, keys, values, table, rows, lengths, prefixes, *args, **kw)

    wrap(TorchNativeAttnBackend, "_run_sdpa_forward_extend", around)


@plant
def kv_cache_in_bfloat16() -> None:
    """Change nothing: the engine argument kv_cache_dtype alone makes SGLang round keys and values."""


@plant
def tensor_rounded_after_sync() -> None:
    """Round one tensor of the second rank to bfloat16 whenever weights have been loaded: half of down_proj of layer 1."""
    import torch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.runtime_context import get_parallel

    def spoil(model: Any) -> None:
        weight = model.model.layers[1].mlp.down_proj.weight
        if get_parallel().tp_rank == 1:
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

    wrap(ModelRunner, "load_model", after_start)
    for name in ("update_weights_from_tensor", "load_weights_from_distributed", "update_weights_from_disk"):
        wrap(WeightUpdater, name, after_update)
    wrap(WeightUpdater, "end_weight_update", after_update)


# The trainer.


@plant_in_trainer
def trainer_masks_groups_with_zero() -> None:
    """Give experts of the other groups the score 0 instead of -inf, so that those beat experts with a negative score.

    Releases of transformers have routed so (transformers#45440).
    """
    import torch
    from torch.nn.functional import linear
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    def around(real: Any, self: Any, hidden_states: Any) -> Any:
        logits = linear(hidden_states.view(-1, self.hidden_dim).float(), self.weight.float())
        scores = logits.sigmoid()
        choice = (scores + self.e_score_correction_bias).view(len(scores), self.num_group, -1)
        best = choice.topk(2, dim=-1).values.sum(-1).topk(self.topk_group, dim=-1).indices
        others = torch.ones_like(choice[..., 0], dtype=torch.bool).scatter(1, best, False)
        ids = choice.masked_fill(others[..., None], 0.0).flatten(1).topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * self.routed_scaling_factor, ids

    wrap(DeepseekV3TopkRouter, "forward", around)


@plant_in_trainer
def trainer_positions_of_left_padding() -> None:
    """Count positions as if the padding were on the left: position 0 for as many tokens as the row has padding, then 1, 2, ...

    The longest row of a batch, and a sequence alone, are right.
    """
    import torch
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        mask = kw.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and kw.get("position_ids") is None:
            width = mask.shape[1]
            padding = width - mask.sum(-1, keepdim=True)
            kw["position_ids"] = (torch.arange(width, device=mask.device)[None] - padding).clamp(min=0)
        return real(self, *args, **kw)

    wrap(Qwen2Model, "forward", around)


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
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            attention_mask = attention_mask.bfloat16()
        narrow = (each.bfloat16() for each in (query, key, value))
        output, weights = sdpa_attention_forward(module, *narrow, attention_mask, *args, **kw)
        return output.to(query.dtype), weights

    AttentionInterface.register("sdpa", rounded)
