from pathlib import Path

import pytest
import torch

from harness.weights.verify import LogProbDifference, describe, log_prob_difference
from tests.gloo import on_ranks

INF = float("inf")


@pytest.mark.parametrize(
    ("name", "described"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("l.self_attn.o_proj.weight", "l.self_attn.o_proj.weight"),
        ("l.qkv_proj.bias", "l.qkv_proj.bias (l.q_proj.bias, l.k_proj.bias, l.v_proj.bias)"),
        ("l.mlp.gate_up_proj.weight", "l.mlp.gate_up_proj.weight (l.mlp.gate_proj.weight, l.mlp.up_proj.weight)"),
        ("l.mlp.experts.w13_weight",
         "l.mlp.experts.w13_weight (l.mlp.experts.*.gate_proj.weight, l.mlp.experts.*.up_proj.weight)"),
        ("l.mlp.experts.w2_weight", "l.mlp.experts.w2_weight (l.mlp.experts.*.down_proj.weight)"),
        ("l.mlp.experts.w2_weight_scale", "l.mlp.experts.w2_weight_scale"),
        ("l.fused_qkv_a_proj_with_mqa.weight",
         "l.fused_qkv_a_proj_with_mqa.weight (l.q_a_proj.weight, l.kv_a_proj_with_mqa.weight)"),
    ],
)  # fmt: skip
def test_describe_names_what_the_engine_fused(name: str, described: str) -> None:
    assert describe(name) == described


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
