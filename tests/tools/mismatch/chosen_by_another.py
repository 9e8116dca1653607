"""Planted sources that another examiner chose, without having read or run the tool, and what it must name for them.

`sources` are the answers that are right; where there are several, each says the same truly. `module` is the first
module whose output is wrong, on the side that is wrong; it is empty where the wrong step lies between modules or is not
a module's, or where the two sides give the module different names. For a setting it says where the setting acts.
"""

from tests.tools.mismatch.sources import Planted

CHOSEN = (
    # Attention, rotary embedding and norms of the engine.
    Planted(
        name="rope_pairs_interleaved",
        model="llama",
        sources=("layers.0.self_attn.rotary_emb",),
        module="rotary_emb",
    ),
    Planted(name="k_norm_in_bfloat16", model="qwen3", sources=("layers.1.self_attn.k_norm",), module="k_norm"),
    # w_kc and w_vc are tensors of the engine that are not the trainer's; they are used in self_attn itself, around
    # attn_mqa.
    Planted(
        name="absorbed_kv_in_bfloat16",
        model="moonlight",
        sources=(
            "weights",
            "layers.0.self_attn.kv_b_proj",
            "layers.0.self_attn.attn_mqa",
            "layers.0.self_attn.attn",
            "layers.0.self_attn",
        ),
    ),
    # Mixture of experts.
    Planted(
        name="gate_and_up_swapped",
        model="qwen3_moe",
        sources=("layers.0.mlp.experts",),
        module="mlp.experts",
    ),
    Planted(name="group_limit_ignored", model="deepseek_v3", sources=("layers.1.mlp.topk",), module="mlp.topk"),
    Planted(
        name="one_expert_slightly_too_large",
        model="moonlight",
        sources=("layers.1.mlp.experts",),
        module="mlp.experts",
    ),
    # SGLang chooses the experts in topk, transformers in gate.
    Planted(
        name="trainer_masks_groups_with_zero",
        model="deepseek_v3",
        sources=("layers.1.mlp.topk", "layers.1.mlp.gate"),
    ),
    # Tied to an engine argument.
    Planted(
        name="expert_parallel_offset",
        model="qwen3_moe",
        words=("--engine.args.ep_size", "2"),
        sources=("engine.args.ep_size",),
        module="mlp.experts",
    ),
    Planted(
        name="kv_cache_in_bfloat16",
        model="qwen3",
        words=("--engine.args.kv_cache_dtype", "bfloat16"),
        sources=("engine.args.kv_cache_dtype",),
        module="self_attn.attn",
    ),
    # Only in decode, or with a cached prefix.
    Planted(name="decode_attention_in_bfloat16", model="llama", sources=("decode",), module="self_attn.attn"),
    Planted(name="first_cached_token_lost", sources=("prefix cache",), module="self_attn.attn"),
    # The weights after loading.
    Planted(name="tensor_rounded_after_sync", sources=("weights",)),
    # The trainer.
    Planted(name="trainer_positions_of_left_padding", sources=("batch of the trainer",)),
    Planted(name="trainer_logits_in_bfloat16", model="llama", sources=("head",)),
    Planted(
        name="trainer_sdpa_in_bfloat16",
        model="qwen3",
        sources=("trainer attention",),
        module="self_attn.attn",
    ),
)
