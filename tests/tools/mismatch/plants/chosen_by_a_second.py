"""Sources of mismatch that a second examiner chose, in SGLang and in transformers: see planting.py."""

from typing import Any

from planting import in_decode, plant, plant_in_trainer, reached, wrap


@plant
def qk_norm_after_rope() -> None:
    """Rotate queries and keys first and normalise their heads then (Hunyuan's order), in a model that does the
    reverse."""
    from sglang.srt.models import qwen3

    def around(real: Any, self: Any, positions: Any, hidden_states: Any) -> Any:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb(positions, q.contiguous(), k.contiguous())
        q, k = qwen3.apply_qk_norm(
            q=q, k=k, q_norm=self.q_norm, k_norm=self.k_norm, head_dim=self.head_dim, alt_stream=self.alt_stream
        )
        return q, k, v

    wrap(qwen3.Qwen3Attention, "forward_prepare_native", around)


@plant
def routed_scaling_missing() -> None:
    """Add what the routed experts return without multiplying it by routed_scaling_factor."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> None:
        real(self, *args, **kw)
        self.routed_scaling_factor = 1.0

    wrap(DeepseekV2MoE, "__init__", around)


@plant
def rope_ends_at_32() -> None:
    """Rotate every token beyond position 32 as if it were at 32: a table that is too short, read with a clamped
    index."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    def around(real: Any, self: Any, positions: Any, *args: Any, **kw: Any) -> Any:
        return real(self, positions.clamp(max=32), *args, **kw)

    wrap(RotaryEmbedding, "forward", around, when=lambda self, positions, *_, **__: int(positions.max()) > 32)


@plant
def gqa_heads_tiled() -> None:
    """Let query head i read key-value head i % n instead of i // group: repeat in place of repeat_interleave."""
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention

    def around(real: Any, self: Any, q: Any, k: Any, v: Any, *args: Any, **kw: Any) -> Any:
        heads, kv = self.tp_q_head_num, self.tp_k_head_num
        group = heads // kv
        place = torch.tensor([i % kv * group + i // kv for i in range(heads)], device=q.device)
        by_head = q.reshape(-1, heads, self.qk_head_dim)
        moved = torch.empty_like(by_head)
        moved[:, place] = by_head
        output = real(self, moved.reshape(q.shape), k, v, *args, **kw)
        return output.reshape(-1, heads, self.v_head_dim)[:, place].reshape(output.shape)

    wrap(RadixAttention, "forward", around)


@plant
def vocabulary_shard_too_short() -> None:
    """Mask the last 32 tokens of the first rank's shard of the vocabulary: no rank embeds them, and they are zero."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    def lost(self: Any, ids: Any) -> Any:
        end = self.shard_indices.org_vocab_end_index
        return (ids >= end - 32) & (ids < end)

    def around(real: Any, self: Any, ids: Any) -> Any:
        return real(self, ids).masked_fill(lost(self, ids).unsqueeze(-1), 0)

    wrap(
        VocabParallelEmbedding,
        "_embed_local_shard",
        around,
        when=lambda self, ids: (
            self.tp_size > 1 and self.shard_indices.org_vocab_start_index == 0 and lost(self, ids).any()
        ),
    )


@plant
def experts_have_capacity() -> None:
    """Let an expert take 40 tokens of one forward pass and drop the others, as training with a capacity factor does.

    A prefill of many prompts fills an expert, a sequence alone seldom does.
    """
    import torch
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    def surplus(ids: Any) -> Any:
        chosen = torch.nn.functional.one_hot(ids.long().flatten().clamp(min=0))
        order = (chosen.cumsum(0) * chosen).sum(-1)
        return (order > 40).view(ids.shape)

    def around(real: Any, self: Any, hidden_states: Any, topk_output: Any, *args: Any, **kw: Any) -> Any:
        kept = topk_output.topk_weights.masked_fill(surplus(topk_output.topk_ids), 0)
        return real(self, hidden_states, topk_output._replace(topk_weights=kept), *args, **kw)

    wrap(FusedMoE, "forward", around, when=lambda self, hidden, topk, *_, **__: bool(surplus(topk.topk_ids).any()))


@plant_in_trainer
def trainer_slides_in_one_layer() -> None:
    """Give the trainer's second layer a sliding window of 16, as transformers reads use_sliding_window; SGLang's Qwen2
    has none."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

    def around(real: Any, self: Any, config: Any, *args: Any, **kw: Any) -> None:
        config.use_sliding_window, config.sliding_window = True, 16
        config.layer_types = ["full_attention", "sliding_attention"]
        real(self, config, *args, **kw)

    wrap(Qwen2Model, "__init__", around)


@plant_in_trainer
def trainer_drops_attention() -> None:
    """Leave the trainer's attention dropout (0.05) on, in every pass: eval() does not reach it."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        was = self.training, self.attention_dropout
        self.training, self.attention_dropout = True, 0.05
        output = real(self, *args, **kw)
        self.training, self.attention_dropout = was
        return output

    wrap(LlamaAttention, "forward", around)


# The last three were chosen after the answers to the others were known.


@plant
def last_of_a_full_decode_batch_not_stored() -> None:
    """Store zeros for the newest key and value of the last sequence, in decode with more than 4 sequences."""
    from sglang.srt.layers.radix_attention import RadixAttention

    def around(real: Any, self: Any, q: Any, k: Any, v: Any, *args: Any, **kw: Any) -> Any:
        k, v = k.clone(), v.clone()
        k[-1], v[-1] = 0, 0
        return real(self, q, k, v, *args, **kw)

    wrap(RadixAttention, "forward", around, when=lambda *args, **kw: in_decode(*args, **kw) and len(args[1]) > 4)


@plant
def residual_in_bfloat16() -> None:
    """Round the residual that a norm passes on to bfloat16. The norm's own output is right."""
    from sglang.srt.layers.layernorm import RMSNorm

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        output = real(self, *args, **kw)
        if isinstance(output, tuple):
            reached()
            return output[0], output[1].bfloat16().to(output[1].dtype)
        return output

    wrap(RMSNorm, "forward", around)


@plant_in_trainer
def trainer_rotary_in_bfloat16() -> None:
    """Compute the trainer's cos and sin from frequencies in bfloat16, to which model.to(bfloat16) casts inv_freq
    too."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    def around(real: Any, self: Any, *args: Any, **kw: Any) -> Any:
        own = self.inv_freq
        self.inv_freq = own.bfloat16().to(own.dtype)
        output = real(self, *args, **kw)
        self.inv_freq = own
        return output

    wrap(Qwen2RotaryEmbedding, "forward", around)
