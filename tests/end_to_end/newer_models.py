"""Tiny checkpoints of models that the harness does not make itself, in sizes that the kernels of a GPU take."""

import json
from pathlib import Path
from typing import Any

COMMON = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "initializer_range": 0.04,
}  # fmt: skip
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
MOE = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK = {
    "moe_intermediate_size": 128, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
}  # fmt: skip
MLA = {
    "q_lora_rank": 256, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "num_key_value_heads": 8, "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
DSA = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64, "head_dim": 64}
"""The indexer's real sizes, which its kernels are made for."""
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_v32": DEEPSEEK | MLA | DSA | {"num_experts": 16},  # which transformers 5.12 reads, and SGLang does not
    "glm4_moe": DEEPSEEK,
    "gpt_oss": EXPERTS | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128},
    "minimax_m2": EXPERTS,
    "qwen3_5_moe_text": MOE | LINEAR | {"shared_expert_intermediate_size": 128},
    "qwen3_next": MOE | LINEAR | {"shared_expert_intermediate_size": 128},
}
"""Architecture, as transformers calls it -> the fields that make it tiny."""
HYBRID = {
    "full_attention_interval": 2, "layer_types": None, "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
}  # fmt: skip
ENGINE_FIELDS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"swiglu_limit": 7.0},
    "minimax_m2": {
        "scoring_func": "sigmoid", "rotary_dim": 64, "use_routing_bias": True, "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    },
    "qwen3_5_moe_text": HYBRID, "qwen3_next": HYBRID,
}  # fmt: skip
"""What SGLang's class reads besides, and transformers' config does not write."""


def save_newer_model(name: str, folder: Path) -> Path:
    """Write a random model in bfloat16, its config as SGLang reads it, and a tokenizer; return the folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from harness.task.tiny_models import train_tokenizer

    config = AutoConfig.for_model(name, **(COMMON | FIELDS[name]))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    train_tokenizer(["12 + 7 = 19"] * 4, config.vocab_size).save_pretrained(folder)
    file = folder / "config.json"
    read_by_sglang = {
        key: value
        for key, value in (json.loads(file.read_text()) | ENGINE_FIELDS.get(name, {})).items()
        if value is not None
    }
    file.write_text(json.dumps(read_by_sglang))
    return folder
