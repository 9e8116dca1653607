"""What is planted, on which model, and what launch/mismatch.py must name for it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One planted source of mismatch."""

    name: str
    """Of a function in plants/."""
    model: str = "qwen2"
    words: tuple[str, ...] = ()
    """Options of the command line."""
    sources: tuple[str, ...] = ()
    """Names of sources that are right."""
    module: str = ""
    """The end of the name of the first module that differs."""


PLANTED = (
    Planted(name="rope_base", sources=("layers.0.self_attn.rotary_emb",), module="rotary_emb"),
    Planted(name="double_all_reduce", sources=("tensor parallelism",)),
    Planted(name="router_in_bfloat16", model="qwen3_moe", sources=("layers.0.mlp.gate",), module="mlp.gate"),
    Planted(name="skipped_expert", model="qwen3_moe", sources=("layers.0.mlp.topk",), module="mlp.topk"),
    Planted(name="norm_epsilon", sources=("layers.0.input_layernorm",), module="input_layernorm"),
    Planted(name="temperature_not_applied", words=("--rollout.temperature", "0.5"), sources=("temperature",)),
    Planted(name="attention_scale", sources=("layers.0.self_attn.attn",), module="self_attn.attn"),
    Planted(name="decode_position", sources=("decode",)),
    Planted(name="batch_in_prefill", sources=("batch of the engine",)),
    Planted(name="scaled_embedding", sources=("embed_tokens",), module="embed_tokens"),
    Planted(name="scaled_logits", sources=("head",)),
    Planted(name="shared_expert_twice", model="deepseek_v3", sources=("layers.1.mlp.shared_experts", "layers.1.mlp")),
    Planted(
        name="chunk_position",
        words=("--engine.args.chunked_prefill_size", "16"),
        sources=("engine.args.chunked_prefill_size",),
    ),
    Planted(name="other_activation", model="llama", sources=("layers.0.mlp",), module="mlp.down_proj input"),
    Planted(name="correction_bias_ignored", model="deepseek_v3", sources=("layers.1.mlp.topk",), module="mlp.topk"),
    Planted(
        name="router_in_bfloat16",
        model="qwen3_moe",
        words=("--model.dtype", "float16"),
        sources=("precision of the engine's router",),
    ),
    Planted(
        name="decode_steps_in_bfloat16",
        words=("--engine.args.num_continuous_decode_steps", "2"),
        sources=("engine.args.num_continuous_decode_steps",),
    ),
    Planted(name="trainer_without_temperature", words=("--rollout.temperature", "0.7"), sources=("temperature",)),
    Planted(name="trainer_sends_a_rounded_bias", model="deepseek_v3", sources=("weights",)),
)
