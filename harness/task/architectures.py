"""Names of the tiny models. Imports nothing: configuration checks read it."""

ARCHITECTURES = ("qwen2", "qwen3", "llama", "qwen3_moe", "deepseek_v3", "moonlight")
"""moonlight is deepseek_v3 without the low-rank query projection (q_lora_rank None)."""


def is_tiny(name: str) -> bool:
    """Whether model `name` is one made on the spot, rather than a folder or a hub id."""
    return name in ARCHITECTURES
