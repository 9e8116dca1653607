import os
from pathlib import Path

import pytest
import torch

from harness.cluster.placement import RankLocation
from harness.cluster.world import World
from harness.weights.reload import Output, check_shared, describe_tensor, output_difference
from harness.weights.snapshot import changed
from tests.cluster.gloo import on_ranks


def world_of(rank: int) -> World:
    locations = tuple(RankLocation(rank=each, host=f"host{each}", local_rank=0, visible=None) for each in range(2))
    return World(
        rank=rank, world_size=2, local_rank=0, host=f"host{rank}", device=torch.device("cpu"), locations=locations
    )


def _shared(rank: int, folder: str) -> str:
    from harness.weights import reload

    reload.SHARED_FOLDER_SECONDS = 0.3
    (own := Path(folder) / f"rank{rank}").mkdir()
    os.chdir(own)  # a relative path is then another folder on each rank
    check_shared(Path(folder) / "checkpoints", world_of(rank), "weights.folder")
    try:
        check_shared(Path("checkpoints"), world_of(rank), "weights.folder")
    except ValueError as error:
        return str(error)
    return ""


def test_a_folder_that_one_host_does_not_see_is_refused_on_every_rank(tmp_path: Path) -> None:
    one, other = on_ranks(_shared, 2, tmp_path, str(tmp_path))
    assert one == other and one.startswith("weights.folder must be a folder that all hosts share, got checkpoints")
    assert "not there on host1." in one
    assert list((tmp_path / "checkpoints").iterdir()) == []


A: Output = [(-1.0, 5), (-2.0, 6), (-1.5, 7)]


@pytest.mark.parametrize(
    ("before", "after", "mean"),
    [
        ([A, A], [A, A], 0.0),
        ([A], [[(-1.0, 5), (-2.25, 6), (-1.75, 7)]], 0.5 / 3),
        ([A], [[(-1.0, 5), (-2.5, 9), (-9.0, 7)]], 0.25),  # what follows another token says nothing
    ],
)
def test_outputs_differ_by_the_mean_up_to_the_first_other_token(
    before: list[Output], after: list[Output], mean: float
) -> None:
    assert output_difference(before, after) == pytest.approx(mean)


def test_changed_names_what_differs_or_is_new_on_any_scheduler() -> None:
    before = {0: {"a": "1", "b": "2"}, 1: {"a": "1", "b": "2"}}
    assert changed(before, before) == set()
    assert changed(before, {0: {"a": "1", "b": "2"}, 1: {"a": "1", "b": "3", "c": "4"}}) == {"b"}  # c is new, an alias
    assert changed({}, {}) == set()


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
    assert describe_tensor(name, checkpoint) == described
