import dataclasses
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.config.precision import FP8_BLOCK
from harness.weights.log_probs import (
    FLOOR,
    Allowed,
    LogProbDifference,
    PartDifference,
    log_prob_difference,
    merge,
)
from tests.cluster.gloo import on_ranks

INF = float("inf")


def difference(mean: float, sequence: float | None = None, position: float | None = None) -> LogProbDifference:
    """The bulks are the mean unless given."""
    worst, at = mean if sequence is None else sequence, mean if position is None else position
    return LogProbDifference(
        mean=mean,
        bulk=mean,
        largest=max(mean, worst, at),
        tokens=256,
        percentile_99=worst,
        k3=mean,
        sequence=PartDifference(index=3, mean=worst, bulk=worst),
        position=PartDifference(index=7, mean=at, bulk=at),
    )


CASES = [
    # engine by rank, mask by rank; the trainer's log-probs are 0. Columns are prompt or response as the mask says.
    ([[[-1.0, 0.5]], [[9.0, 0.0], [2.5, 9.0]]], [[[1, 1]], [[0, 1], [1, 0]]]),
    ([[[math.nan, 1.0]], [[2.0, 3.0]]], [[[0, 1]], [[1, 1]]]),  # a NaN that does not count
    ([[[math.nan, 1.0]], [[2.0, 3.0]]], [[[1, 1]], [[1, 1]]]),
    ([[[1.0, -INF, 1.0]], [[2.0, 3.0, 0.0]]], [[[1, 1, 1]], [[1, 1, 0]]]),
]


def _all_differences(rank: int) -> list[LogProbDifference]:
    found = []
    for engine, mask in CASES:
        ours = torch.tensor(engine[rank])
        found.append(log_prob_difference(ours, torch.zeros_like(ours), torch.tensor(mask[rank])))
    return found


def test_the_difference_is_over_the_response_tokens_of_all_ranks(tmp_path: Path) -> None:
    found = on_ranks(_all_differences, 2, tmp_path)
    assert found[0] == found[1]
    first, unmasked, undefined, infinite = found[0]
    assert (first.mean, first.largest, first.tokens, first.percentile_99) == (1.0, 2.5, 4, 2.5)
    # log(p_trainer / p_engine) is 1.0, -0.5, 0.0, -2.5.
    assert first.k3 == pytest.approx((math.e - 2 + math.exp(-0.5) - 0.5 + 0 + math.exp(-2.5) + 1.5) / 4)
    # Sequences are 0: [1.0, 0.5], 1: [0.0], 2: [2.5]; position 0 of each is 1.0, 0.0, 2.5, position 1 is 0.5.
    assert first.sequence == PartDifference(index=2, mean=2.5, bulk=0.0)
    assert first.position == PartDifference(index=0, mean=3.5 / 3, bulk=0.0)
    assert (unmasked.mean, unmasked.largest, unmasked.sequence.index) == (2.0, 3.0, 1)
    assert (undefined.mean, undefined.sequence.mean, undefined.sequence.index) == (INF, INF, 0)
    assert (infinite.largest, infinite.sequence.index, infinite.position.index) == (INF, 0, 1)


def test_an_engine_that_is_a_little_less_exact_than_the_trainer_passes_and_one_that_computes_otherwise_does_not() -> (
    None
):
    allowed = Allowed.of(difference(0.007, sequence=0.008, position=0.007))
    assert allowed.violations(difference(0.0098, sequence=0.012)) == []
    for failure in (0.0145, 0.2589):
        assert any("in the mean (" in each for each in allowed.violations(difference(failure)))
    assert Allowed.of(difference(0.001)).violations(difference(0.003)) != [], "no floor of half precision hides it"


def test_float32_fails_for_an_error_of_1e_4_and_passes_what_is_healthy() -> None:
    allowed = Allowed.of(None)
    assert allowed.violations(difference(5e-7, sequence=2e-6)) == []
    assert len(allowed.violations(difference(1e-4))) == 4
    assert FLOOR["float32"] == pytest.approx(1e-5, rel=0.01)


def test_jumps_of_a_router_pass_and_an_error_of_most_tokens_does_not() -> None:
    quiet = difference(0.0009, sequence=0.001, position=0.001)
    noisy = dataclasses.replace(difference(0.023, sequence=0.035, position=0.021), bulk=0.0015)
    assert len(Allowed.of(quiet).violations(noisy)) == 3
    allowed = Allowed.of(quiet, has_experts=True)
    assert allowed.violations(noisy) == []
    (found,) = allowed.violations(dataclasses.replace(noisy, bulk=0.003))
    assert "three quarters that differ least (allowed 0.0018)" in found


def test_fp8_is_held_to_its_own_first_load_and_without_one_to_what_two_models_have_in_common() -> None:
    assert Allowed.of_quantized(FP8_BLOCK, difference(0.15)).violations(difference(0.4)) == []
    assert len(Allowed.of_quantized(FP8_BLOCK, difference(0.15)).violations(difference(0.5))) == 3
    assert Allowed.of_quantized(FP8_BLOCK, None).violations(difference(0.5)) == []
    assert Allowed.of_quantized(FP8_BLOCK, None).violations(difference(0.7)) != []


def test_one_sequence_or_one_position_alone_fails_and_is_named_and_so_does_what_is_undefined() -> None:
    allowed = Allowed.of(difference(0.005, sequence=0.008, position=0.008))
    assert allowed.violations(difference(0.010, sequence=0.08)) == ["8.00e-02 in sequence 3 (allowed 0.03)"]
    assert allowed.violations(difference(0.010, position=0.08)) == ["8.00e-02 at response position 7 (allowed 0.016)"]
    for value in (INF, math.nan):
        assert len(Allowed.of(difference(0.01)).violations(difference(value))) == 4


@pytest.mark.usefixtures("alone")
def test_a_sequence_is_judged_by_its_bulk_and_a_jump_of_one_token_is_none_of_it() -> None:
    def of_gaps(gaps: torch.Tensor, mask: float = 1.0) -> LogProbDifference:
        return log_prob_difference(gaps, torch.zeros_like(gaps), torch.full_like(gaps, mask))

    gaps = torch.full((16, 16), 0.01)
    gaps[4, :3] = 0.7  # healthy: a router chose other experts
    gaps[9] = 0.02
    found = of_gaps(gaps)
    assert (found.sequence.index, found.sequence.bulk) == (9, pytest.approx(0.02))
    assert found.position.bulk == found.bulk == pytest.approx(0.01)
    assert found.mean == pytest.approx((237 * 0.01 + 3 * 0.7 + 16 * 0.02) / 256)
    few = of_gaps(torch.tensor([[0.1] * 7, [0.2] * 7]))  # shown, and not judged
    assert few.sequence == PartDifference(index=1, mean=pytest.approx(0.2), bulk=0.0)
    assert few.position.bulk == 0
    with pytest.raises(ValueError, match="a response token on some rank, got none"):
        of_gaps(torch.zeros(1, 2), mask=0)


def test_rollouts_merge_to_the_mean_of_all_tokens_and_the_worst_parts() -> None:
    one, other = difference(0.1, sequence=0.5), dataclasses.replace(difference(0.4, sequence=0.4), tokens=512)
    merged = merge([one, other])
    assert merged.mean == pytest.approx(0.3) and merged.tokens == 768
    assert (merged.sequence.bulk, merged.position.bulk, merged.largest) == (0.5, 0.4, 0.5)
    assert merge([one]) == one


@given(st.floats(0, 1), st.booleans())
def test_an_engine_as_exact_as_the_trainer_always_passes(mean: float, has_experts: bool) -> None:
    rounding = difference(mean, sequence=1.9 * mean, position=0.7 * mean)
    assert Allowed.of(rounding, has_experts=has_experts).violations(rounding) == []
