"""Planted sources that a second examiner chose, without having read or run the tool, and what it must name for them.

The expectations were written before any run. The last three sources are smaller, and were chosen when the answers for
the others were known.
"""

from tests.tools.mismatch.sources import Planted

CHOSEN_LATER = (
    Planted(
        name="qk_norm_after_rope",
        model="qwen3",
        sources=("layers.0.self_attn.q_norm", "layers.0.self_attn.k_norm", "layers.0.self_attn.rotary_emb"),
    ),
    Planted(name="routed_scaling_missing", model="deepseek_v3", sources=("layers.1.mlp.experts", "layers.1.mlp")),
    Planted(name="rope_ends_at_32", model="llama", sources=("layers.0.self_attn.rotary_emb",), module="rotary_emb"),
    Planted(name="gqa_heads_tiled", sources=("layers.0.self_attn.attn",), module="self_attn.attn"),
    Planted(name="vocabulary_shard_too_short", model="qwen3", sources=("embed_tokens", "tensor parallelism")),
    Planted(name="experts_have_capacity", model="qwen3_moe", sources=("batch of the engine",)),
    Planted(
        name="trainer_slides_in_one_layer",
        sources=("layers.1.self_attn.attn", "layers.1.self_attn"),
        module="self_attn.attn",
    ),
    Planted(
        name="trainer_drops_attention",
        model="llama",
        sources=("layers.0.self_attn.attn", "layers.0.self_attn"),
        module="self_attn.attn",
    ),
    Planted(name="last_of_a_full_decode_batch_not_stored", model="llama", sources=("decode", "batch of the engine")),
    Planted(
        name="residual_in_bfloat16",
        model="llama",
        sources=("layers.1.input_layernorm", "layers.0.post_attention_layernorm", "layers.0", "layers.1"),
    ),
    Planted(name="trainer_rotary_in_bfloat16", sources=("layers.0.self_attn.rotary_emb",), module="rotary_emb"),
)
