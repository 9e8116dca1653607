from pathlib import Path

import pytest
import torch

from harness.weights.verify import LogProbDifference, describe, log_prob_difference
from tests.gloo import on_ranks

INF = float("inf")


QWEN3_MOE = [
    *[f"l.0.self_attn.{part}_proj.weight" for part in "qkvo"],
    *[f"l.0.mlp.experts.{expert}.{part}_proj.weight" for expert in (0, 1) for part in ("gate", "up", "down")],
    "l.1.mlp.gate_proj.weight",
    "l.1.mlp.up_proj.weight",
    "norm.weight",
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


def _difference(rank: int, engine: list[list[list[float]]], mask: list[list[list[int]]]) -> LogProbDifference:
    ours = torch.tensor(engine[rank])
    return log_prob_difference(ours, torch.zeros_like(ours), torch.tensor(mask[rank]))


CASES = [
    # (engine by rank, mask by rank, mean, largest); the trainer's log-probs are 0.
    ([[[-1.0, 0.5]], [[9.0, 0.0], [2.5, 9.0]]], [[[1, 1]], [[0, 1], [1, 0]]], 1.0, 2.5),
    ([[[float("nan"), 1.0]], [[2.0, 3.0]]], [[[0, 1]], [[1, 1]]], 2.0, 3.0),  # a NaN that does not count
    ([[[float("nan"), 1.0]], [[2.0, 3.0]]], [[[1, 1]], [[1, 1]]], INF, INF),
    ([[[-INF, 1.0]], [[2.0, 3.0]]], [[[1, 1]], [[1, 1]]], INF, INF),
]


def _all_differences(rank: int) -> list[LogProbDifference]:
    return [_difference(rank, engine, mask) for engine, mask, _, _ in CASES]


def test_log_prob_difference_is_over_the_response_tokens_of_all_ranks(tmp_path: Path) -> None:
    expected = [LogProbDifference(mean=mean, largest=largest) for _, _, mean, largest in CASES]
    assert on_ranks(_all_differences, 2, tmp_path) == [expected] * 2
