"""The value model's updates, measured by two ranks."""

from typing import Any

import pytest

Measurements = list[dict[str, Any]]

pytestmark = pytest.mark.slow


def test_two_ranks_update_as_one_process(measurements: Measurements) -> None:
    for rank in measurements:
        measured = rank["critic"]
        assert measured["weights"] < 1e-5
        assert measured["moved"] > 1e-4
        assert measured["metrics"] < 1e-5


def test_explained_variance_is_over_all_ranks(measurements: Measurements) -> None:
    explained = [rank["critic"]["explained_variance"] for rank in measurements]
    whole = measurements[0]["critic"]["explained_variance_whole"]
    assert explained[0] == explained[1] == pytest.approx(whole, abs=1e-6)
