"""The policy's updates: over two ranks as in one process, and the same again from the same seed."""

from typing import Any

import pytest

Measurements = list[dict[str, Any]]

pytestmark = pytest.mark.slow

ARCHITECTURES = ("qwen2", "qwen2_tied", "qwen3_moe", "deepseek_v3")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_ranks_in_microbatches_step_as_one_process_at_once(measurements: Measurements, name: str) -> None:
    for rank in measurements:
        measured = rank[f"update/{name}"]
        assert measured["gradient_names"] == 0, "every parameter has a gradient"
        assert measured["gradients"] < 1e-5, "relative to the largest"
        assert measured["metrics"] < 1e-4
        assert measured["weights"] < 1e-5, "after two steps"
        assert measured["metrics_agree"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_step_changes_every_parameter_and_no_buffer(measurements: Measurements, name: str) -> None:
    for rank in measurements:
        assert rank[f"update/{name}"]["unchanged"] == []
        assert rank[f"update/{name}"]["changed_buffers"] == []


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradient_checkpointing_changes_no_gradient(measurements: Measurements, name: str) -> None:
    assert measurements[0][f"update/{name}"]["checkpointed"] < 1e-6


def test_clipping_and_kl_took_part(measurements: Measurements) -> None:
    measured = measurements[0]["update/qwen2"]
    assert measured["grad_norm"] > 0.5, "above max_grad_norm"
    assert measured["clip_fraction_lower"] > 0
    assert measured["kl"] > 0.1


def test_errors_are_raised_on_every_rank_and_leave_the_model(measurements: Measurements) -> None:
    for rank in measurements:
        errors = rank["errors"]
        assert errors["infinite"].startswith("the gradient norm of the actor must be finite, got nan")
        assert "at least 1 response token over all ranks, got 0" in errors["silent"]
        assert errors["weights"] == 0


def test_a_minibatch_without_a_token_that_counts_makes_no_optimizer_step(measurements: Measurements) -> None:
    for rank in measurements:
        partly, minibatches = rank["errors"]["partly"], rank["errors"]["minibatches"]
        assert 0 < partly["optimizer_steps"] < minibatches and partly["grad_norm"] > 0 and partly["learning_rate"] > 0


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


@pytest.mark.long
def test_same_seed_same_updates_in_another_process(measurements: Measurements, offloads: Measurements) -> None:
    first = measurements[0]["training"]
    assert first == measurements[1]["training"] == offloads[0]["training"] == offloads[1]["training"]
    assert len(set(first["digests"])) == 3, "each update changes the weights"
    assert [metrics["optimizer_steps"] for metrics in first["metrics"]] == [4, 4]
