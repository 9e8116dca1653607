"""What is planted, on which model, and what launch/mismatch.py must name for it.

These sources differ most in the kind of answer and in what the search measures to find it.
"""

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
    ranks: int = 2
    """On a CPU. One is sooner, where nothing that is compared is of several ranks."""
    module: str = ""
    """The end of the name of the first module that differs; empty where none does."""


PLANTED = (
    # A module by its own output, by the experts that it chooses, and what comes before any module.
    Planted(name="rope_base", source="layers.0.self_attn.rotary_emb", module="rotary_emb"),
    Planted(name="correction_bias_ignored", model="deepseek_v3", source="layers.1.mlp.topk", module="mlp.topk"),
    Planted(name="trainer_sends_a_rounded_bias", model="deepseek_v3", source="weights"),
    # How tokens are sampled and scored.
    Planted(name="trainer_without_temperature", words=("--rollout.temperature", "0.7"), source="temperature", ranks=1),
    Planted(name="decode_position", source="decode", ranks=1),
    Planted(name="first_cached_token_lost", source="prefix cache", ranks=1),
    Planted(name="trainer_positions_of_left_padding", source="batch of the trainer", ranks=1),
    # A setting that is changed in another engine.
    Planted(name="double_all_reduce", source="tensor parallelism"),
    # Half precision, in which rounding is a source too.
    Planted(
        name="router_in_bfloat16",
        model="qwen3_moe",
        words=("--model.dtype", "float16"),
        source="precision of the engine's router",
    ),
)
