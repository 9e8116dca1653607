"""Sharded models and their updates on two ranks, against whole models and updates of one process.

Whole PPO steps of a small model are in test_whole_update.py; here are architectures, dtypes and errors.
"""

from typing import Any

import pytest

from tests.cluster.gloo import on_ranks
from tests.trainer.worker_models import MODELS, UPDATED, measure

Measurements = list[dict[str, Any]]

pytestmark = pytest.mark.slow

AT_MOST = {
    "weights": 0,
    "buffers": 0,  # rotary frequencies and correction biases
    "log_probs": 1e-5,
    "eager": 1e-5,
    "in_float32": 1e-5,  # a second model, on the values of one that computes in bfloat16
    "held": 0,  # which are rounded to what the first one computes with
    "values": 1e-5,
}
"""Largest differences from the whole, unpadded model."""
AT_LEAST = {"buffer_names": 2, "entropy": 0.1, "rounding": 1e-3, "value_spread": 0.01}
"""What shows that there was something to compare."""


@pytest.fixture(scope="module")
def measurements(tmp_path_factory: pytest.TempPathFactory) -> Measurements:
    folder = tmp_path_factory.mktemp("sharded")
    return on_ranks(measure, 2, folder, folder)


@pytest.mark.parametrize("name", MODELS)
def test_a_sharded_model_computes_what_the_whole_unpadded_one_does(measurements: Measurements, name: str) -> None:
    for rank in measurements:
        measured = rank[f"log_probs/{name}"]
        for what, limit in AT_MOST.items():
            assert measured[what] <= limit, what
        for what, limit in AT_LEAST.items():
            assert measured[what] >= limit, what
        assert measured["sharded"], "every parameter is a DTensor, between calls too"
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if name == "qwen2_tied" else {}
        assert measured["tied"] == tied, "named once"


@pytest.mark.parametrize("name", UPDATED)
def test_two_ranks_in_microbatches_step_as_one_process_at_once(measurements: Measurements, name: str) -> None:
    for rank in measurements:
        measured = rank[f"update/{name}"]
        assert measured["gradient_names"] == 0, "every parameter has a gradient"
        assert measured["gradients"] < 1e-5, "relative to the largest"
        assert measured["metrics"] < 1e-4 and measured["metrics_agree"]
        assert measured["weights"] < 1e-5, "after two steps"
        assert measured["unchanged"] == measured["changed_buffers"] == []
        assert measured["grad_norm"] > 0.5, "above max_grad_norm"
        assert measured["kl"] > 0.1, "it took part"


def test_errors_are_raised_on_every_rank_and_leave_the_model(measurements: Measurements) -> None:
    for rank in measurements:
        errors = rank["errors"]
        assert "at least 1 response token over all ranks, got 0" in errors["silent"]
        assert errors["weights"] == 0
        partly = errors["partly"]  # a minibatch without a token that counts makes no optimizer step
        assert 0 < partly["optimizer_steps"] < errors["minibatches"]
        assert partly["grad_norm"] > 0 and partly["learning_rate"] > 0


def test_gradients_in_float16_are_those_of_float32_whatever_the_size_of_the_loss(measurements: Measurements) -> None:
    for rank in measurements:
        measured = rank["float16"]
        for size in ("usual", "tiny", "huge"):
            found = measured[size]
            assert found["error"] < 0.01 and found["grad_norm"] == pytest.approx(1, abs=0.01), (size, found)
            assert found["saved"] == found["loss_scale"] and not found["has_scale_in_float32"]
        assert measured["unscaled"] > 0.5, "without a loss scale the tiny gradient is lost"
        assert measured["tiny"]["loss_scale"] == 2**16 > measured["huge"]["loss_scale"] >= 1, "the huge one overflowed"


def test_in_float16_a_gradient_that_no_loss_scale_makes_finite_is_an_error(measurements: Measurements) -> None:
    for rank in measurements:
        infinite, spoiled = rank["float16"]["infinite"], rank["float16"]["spoiled"]
        assert infinite["weights"] == spoiled["weights"] == 0
        assert set(infinite["scales"]) == {2.0**16}, "a loss that is not finite is not an overflow of the gradient"
        assert sorted(set(spoiled["scales"])) == [4.0**n for n in range(9)]
        said = spoiled["said"]
        assert said.startswith("the gradient norm of the actor must be finite, got nan; it is not on ranks 0, 1")
        assert 'model.dtype = "float16"' in said


def test_random_weights_are_distributed_as_said_at_any_world_size(measurements: Measurements) -> None:
    for rank in measurements:
        measured = rank["random"]
        assert measured["differences"] == measured["value_differences"] == 0
        assert measured["same_as_other_seed"] == []
        assert measured["norm_mean"] == pytest.approx(1, abs=0.05)
        assert measured["norm_std"] == pytest.approx(0.1, abs=0.02)
        assert measured["matrix_std"] == pytest.approx(0.1, rel=0.02), "initializer_range of the tiny models"
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


def test_float32_masters_learn_in_bfloat16_what_float32_does(measurements: Measurements) -> None:
    for rank in measurements:
        measured = rank["mixed"]
        assert measured["forward"] == 0, "the forward is that of a model in bfloat16, which is the engine's"
        full, mixed, pure = measured["dtypes"]
        assert full == mixed == ["torch.float32"] and pure == ["torch.bfloat16"]
        mixed, pure = measured["cosine"]
        assert mixed > 0.99 and pure < 0.5, measured["cosine"]
        full, mixed, pure = measured["moved"]
        assert mixed > 0.99 * full and pure < 0.1 * full, measured["moved"]
