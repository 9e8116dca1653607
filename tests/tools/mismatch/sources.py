"""What is planted, on which model, and what launch/mismatch.py must name for it: one source for each kind of answer."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One planted source of mismatch."""

    name: str
    """Of a function in plants/planted_sources.py."""
    model: str = "qwen2"
    words: tuple[str, ...] = ()
    """Options of the command line."""
    source: str = ""
    """What must be named."""
    module: str = ""
    """The end of the name of the first module that differs; empty where none does."""


PLANTED = (
    # A module by its own output, by what reaches its last projection, and by the experts that it chooses.
    Planted(name="rope_base", source="layers.0.self_attn.rotary_emb", module="rotary_emb"),
    Planted(name="other_activation", model="llama", source="layers.0.mlp", module="mlp.down_proj input"),
    Planted(name="correction_bias_ignored", model="deepseek_v3", source="layers.1.mlp.topk", module="mlp.topk"),
    # What comes after the last module, and what comes before any.
    Planted(name="scaled_logits", source="head"),
    Planted(name="trainer_sends_a_rounded_bias", model="deepseek_v3", source="weights"),
    # How tokens are sampled and scored.
    Planted(name="temperature_not_applied", words=("--rollout.temperature", "0.5"), source="temperature"),
    Planted(name="trainer_without_temperature", words=("--rollout.temperature", "0.7"), source="temperature"),
    Planted(name="decode_position", source="decode"),
    Planted(name="first_cached_token_lost", source="prefix cache"),
    Planted(name="batch_in_prefill", source="batch of the engine"),
    Planted(name="trainer_positions_of_left_padding", source="batch of the trainer"),
    # A setting that is changed in another engine, or in another trainer.
    Planted(name="double_all_reduce", source="tensor parallelism"),
    Planted(
        name="kv_cache_in_bfloat16",
        model="qwen3",
        words=("--engine.args.kv_cache_dtype", "bfloat16"),
        source="engine.args.kv_cache_dtype",
        module="self_attn.attn",
    ),
    Planted(name="trainer_sdpa_in_bfloat16", model="qwen3", source="trainer attention", module="self_attn.attn"),
    # Half precision, in which rounding is a source too.
    Planted(
        name="router_in_bfloat16",
        model="qwen3_moe",
        words=("--model.dtype", "float16"),
        source="precision of the engine's router",
    ),
)
