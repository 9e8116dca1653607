import pytest

from harness.weights.fused import describe

QWEN3_MOE = [
    *[f"l.0.self_attn.{part}_proj.weight" for part in "qkvo"],
    *[f"l.0.mlp.experts.{expert}.{part}_proj.weight" for expert in (0, 1) for part in ("gate", "up", "down")],
    "l.1.mlp.gate_proj.weight",
    "l.1.mlp.up_proj.weight",
    "norm.weight",
]
DEEPSEEK = [
    *[f"l.1.self_attn.{part}.weight" for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")],
    *[f"l.1.mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")],
    "l.1.mlp.gate.e_score_correction_bias",
]
MIXTRAL = [f"l.0.block_sparse_moe.experts.{expert}.w{part}.weight" for expert in (0, 1) for part in (1, 2, 3)]


@pytest.mark.parametrize(
    ("name", "checkpoint", "described"),
    [
        ("norm.weight", QWEN3_MOE, "norm.weight"),
        ("l.0.self_attn.o_proj.weight", QWEN3_MOE, "l.0.self_attn.o_proj.weight"),
        (
            "l.0.self_attn.qkv_proj.weight",
            QWEN3_MOE,
            "l.0.self_attn.qkv_proj.weight (l.0.self_attn.q_proj.weight, l.0.self_attn.k_proj.weight,"
            " l.0.self_attn.v_proj.weight)",
        ),
        (
            "l.1.mlp.gate_up_proj.weight",
            QWEN3_MOE,
            "l.1.mlp.gate_up_proj.weight (l.1.mlp.gate_proj.weight, l.1.mlp.up_proj.weight)",
        ),
        (
            "l.0.mlp.experts.w2_weight",
            QWEN3_MOE,
            "l.0.mlp.experts.w2_weight (l.0.mlp.experts.0.down_proj.weight, l.0.mlp.experts.1.down_proj.weight)",
        ),
        ("rotary.cos_sin_cache", QWEN3_MOE, "rotary.cos_sin_cache"),
        (
            "l.1.self_attn.fused_qkv_a_proj_with_mqa.weight",
            DEEPSEEK,
            "l.1.self_attn.fused_qkv_a_proj_with_mqa.weight (l.1.self_attn.q_a_proj.weight,"
            " l.1.self_attn.kv_a_proj_with_mqa.weight)",
        ),
        ("l.1.self_attn.w_kc", DEEPSEEK, "l.1.self_attn.w_kc (l.1.self_attn.kv_b_proj.weight)"),
        ("l.1.self_attn.w_vc", DEEPSEEK, "l.1.self_attn.w_vc (l.1.self_attn.kv_b_proj.weight)"),
        (
            "l.1.mlp.shared_experts.gate_up_proj.weight",
            DEEPSEEK,
            "l.1.mlp.shared_experts.gate_up_proj.weight (l.1.mlp.shared_experts.gate_proj.weight,"
            " l.1.mlp.shared_experts.up_proj.weight)",
        ),
        ("l.1.mlp.gate.e_score_correction_bias", DEEPSEEK, "l.1.mlp.gate.e_score_correction_bias"),
        ("lm_head.weight", ["model.embed_tokens.weight"], "lm_head.weight (model.embed_tokens.weight)"),
        ("lm_head.weight", ["model.embed_tokens.weight", "lm_head.weight"], "lm_head.weight"),
        (
            "l.0.block_sparse_moe.experts.w13_weight",
            MIXTRAL,
            "l.0.block_sparse_moe.experts.w13_weight (l.0.block_sparse_moe.experts.0.w1.weight,"
            " l.0.block_sparse_moe.experts.0.w2.weight, l.0.block_sparse_moe.experts.0.w3.weight,"
            " l.0.block_sparse_moe.experts.1.w1.weight, 2 more)",
        ),
    ],
)
def test_describe_names_what_the_engine_fused(name: str, checkpoint: list[str], described: str) -> None:
    assert describe(name, checkpoint) == described
