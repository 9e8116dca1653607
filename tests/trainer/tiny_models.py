"""Tiny random models of real architectures, saved as transformers saves them."""

from pathlib import Path

import torch
import transformers

COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "initializer_range": 0.2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "num_key_value_heads": 2}
DEEPSEEK = {
    **COMMON,
    **MOE,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "routed_scaling_factor": 1.5,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 128,
    },
}


def tiny_config(name: str) -> transformers.PretrainedConfig:
    """The config of one of NAMES."""
    return {
        "qwen2": lambda: transformers.Qwen2Config(num_key_value_heads=2, tie_word_embeddings=False, **COMMON),
        "qwen2_tied": lambda: transformers.Qwen2Config(num_key_value_heads=2, tie_word_embeddings=True, **COMMON),
        "qwen3": lambda: transformers.Qwen3Config(
            num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, **COMMON
        ),
        "llama": lambda: transformers.LlamaConfig(num_key_value_heads=2, tie_word_embeddings=False, **COMMON),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            num_experts=4, decoder_sparse_step=1, head_dim=16, tie_word_embeddings=False, **COMMON, **MOE
        ),
        "deepseek_v3": lambda: transformers.DeepseekV3Config(**DEEPSEEK),
    }[name]()


NAMES = ("qwen2", "qwen2_tied", "qwen3", "llama", "qwen3_moe", "deepseek_v3")


def save_tiny(name: str, folder: Path, seed: int = 0, initializer_range: float = 0.2) -> str:
    """Save the model in folder; its norms, biases and correction biases are noisy, so that a tensor that is missed
    shows.
    """
    torch.manual_seed(seed)
    config = tiny_config(name)
    config.initializer_range = initializer_range
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(folder)
    return str(folder)
