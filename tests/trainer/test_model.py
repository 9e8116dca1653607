"""Sharded models against transformers' own, measured by two ranks."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.trainer.model import random_rows

Measurements = list[dict[str, Any]]

pytestmark = pytest.mark.slow

ARCHITECTURES = ("qwen2", "qwen2_tied", "qwen3", "llama", "qwen3_moe", "deepseek_v3")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_checkpoint_arrives_whole(measurements: Measurements, name: str) -> None:
    for rank in measurements:
        measured = rank[f"log_probs/{name}"]
        assert measured["weights"] == 0
        assert measured["buffers"] == 0, "rotary frequencies and correction biases"
        assert measured["buffer_names"] >= 2
        assert measured["sharded"], "every parameter is a DTensor, between calls too"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probs_are_those_of_the_whole_unpadded_model(measurements: Measurements, name: str) -> None:
    for rank in measurements:
        measured = rank[f"log_probs/{name}"]
        assert measured["log_probs"] < 1e-5
        assert measured["eager"] < 1e-5
        assert measured["entropy_min"] > 0.1


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_are_those_of_the_whole_backbone(measurements: Measurements, name: str) -> None:
    for rank in measurements:
        assert rank[f"log_probs/{name}"]["values"] < 1e-5
        assert rank[f"log_probs/{name}"]["value_spread"] > 0.1


def test_random_weights_do_not_depend_on_the_world_size(measurements: Measurements) -> None:
    for rank in measurements:
        measured = rank["random"]
        assert measured["differences"] == 0
        assert measured["value_differences"] == 0
        assert measured["same_as_other_seed"] == []


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 5),
    block_values=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 40), max_size=4),
)
def test_random_rows_are_the_same_however_they_are_cut(
    rows: int, columns: int, block_values: int, cuts: list[int]
) -> None:
    def draw(first: int, count: int) -> torch.Tensor:
        shard = torch.full((count, columns), torch.nan)
        for start, block in random_rows((rows, columns), first, count, "key", torch.device("cpu"), block_values):
            shard[start : start + len(block)] = block
        return shard

    edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    whole = draw(0, rows)
    parts = [draw(first, after - first) for first, after in pairwise(edges)]
    assert torch.equal(torch.cat(parts), whole)
    assert len(whole.unique()) == whole.numel(), "no two rows or blocks are alike"


def test_random_weights_are_distributed_as_said(measurements: Measurements) -> None:
    measured = measurements[0]["random"]
    assert measured["norm_mean"] == pytest.approx(1, abs=0.05)
    assert measured["norm_std"] == pytest.approx(0.1, abs=0.02)
    assert measured["matrix_std"] == pytest.approx(0.2, rel=0.02)
    assert measured["smallest"] > 0.05, "no tensor is all zeros, correction biases included"


def test_bfloat16_keeps_correction_biases_in_float32(measurements: Measurements) -> None:
    for rank in measurements:
        measured = rank["bfloat16"]
        wide = [name for name, dtype in measured["dtypes"].items() if dtype == "torch.float32"]
        assert wide == ["model.layers.1.mlp.gate.e_score_correction_bias"]
        assert set(measured["dtypes"].values()) == {"torch.float32", "torch.bfloat16"}
        assert measured["bias_differences"] == 0
        assert measured["inv_freq_dtypes"] == ["torch.float32"]
        assert abs(measured["loss"]) < 10


def test_tied_weights_stay_tied_and_are_named_once(measurements: Measurements) -> None:
    for rank in measurements:
        measured = rank["tied"]
        assert measured["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
        assert "lm_head.weight" not in measured["names"]
        assert len(measured["names"]) == len(set(measured["names"])) == 26
        assert measured["equal"]
