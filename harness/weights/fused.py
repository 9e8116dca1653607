"""Which checkpoint tensors one of the engine's own tensors is made of: SGLang fuses some on arrival."""

from collections.abc import Collection
from fnmatch import fnmatchcase

# The part of the engine's name -> the checkpoint's. All that sglang 0.5.20 fuses, splits or derives in Qwen2, Qwen3, Llama,
# Qwen3-MoE, DeepSeek-V3 and Moonlight; w_kc and w_vc are no parameters, but what MLA computes with in kv_b_proj's stead.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "w_kc": ("kv_b_proj",),
    "w_vc": ("kv_b_proj",),
    "experts.w13_weight": ("experts.*.gate_proj", "experts.*.up_proj"),
    "experts.w2_weight": ("experts.*.down_proj",),
}
# With tied embeddings the engine's head is its embedding, and no checkpoint has the head.
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


def describe(engine_name: str, checkpoint_names: Collection[str]) -> str:
    """model.layers.0.self_attn.qkv_proj.weight -> the same, with the checkpoint names it is made of."""
    if engine_name in checkpoint_names:
        return engine_name
    parts = _fused_from(engine_name, checkpoint_names)
    if not parts:  # an architecture with names of its own: what shares the module
        module = engine_name.rsplit(".", 1)[0] + "."
        parts = [name for name in checkpoint_names if name.startswith(module)]
    shown = [*parts[:4], *([f"{len(parts) - 4} more"] if len(parts) > 4 else [])]
    return f"{engine_name} ({', '.join(shown)})" if shown else engine_name


def _fused_from(engine_name: str, checkpoint_names: Collection[str]) -> list[str]:
    if TIED.get(engine_name) in checkpoint_names:
        return [TIED[engine_name]]
    for fused, parts in FUSED.items():
        head, found, tail = engine_name.partition(f".{fused}")
        if found and not tail.startswith("_"):
            patterns = [f"{head}.{part}{tail or '.weight'}" for part in parts]
            return [name for pattern in patterns for name in checkpoint_names if fnmatchcase(name, pattern)]
    return []
