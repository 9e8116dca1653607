from pathlib import Path
from typing import Any

import pytest

from harness.config.schema import Config
from harness.events import EventLog
from harness.ppo import Ppo, tolerance
from harness.weights.verify import LogProbDifference, WeightsDidNotArrive


class PpoWithoutEngine(Ppo):
    """Its search for suspects answers with `found`, or fails with it; all else is real."""

    found: str | Exception = ""

    def find_suspects(self, index: int) -> str:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def ppo_that_finds(found: str | Exception, folder: Path) -> Ppo:
    parts: dict[str, Any] = dict.fromkeys(Ppo.__dataclass_fields__)
    events = EventLog(folder / "rank0.jsonl", 0, "here")
    ppo = PpoWithoutEngine(**parts | {"config": Config(), "events": events})
    ppo.found = found
    return ppo


def test_the_tolerance_is_that_of_the_dtype() -> None:
    config = Config()
    assert tolerance(config) == config.weights.tolerance_float32
    config.model.dtype = "bfloat16"
    assert tolerance(config) == config.weights.tolerance_bfloat16


def test_a_difference_up_to_the_tolerance_passes(tmp_path: Path) -> None:
    ppo_that_finds("", tmp_path).check_arrival(0, LogProbDifference(mean=1e-5, largest=5.0))


@pytest.mark.parametrize("mean", [1.1e-5, float("inf"), float("nan")])
def test_a_larger_or_undefined_difference_fails_and_names_suspects(mean: float, tmp_path: Path) -> None:
    with pytest.raises(WeightsDidNotArrive, match=r"^step 2: .* allowed mean 1e-05\); .*trainer's: lm_head\.weight$"):
        ppo_that_finds("lm_head.weight", tmp_path).check_arrival(2, LogProbDifference(mean=mean, largest=mean))


def test_a_failed_search_for_suspects_does_not_hide_the_difference(tmp_path: Path) -> None:
    error = OSError("no shared folder")
    with pytest.raises(
        WeightsDidNotArrive, match=r"off by 1\.00e\+00 .*search for them failed \(OSError: no sh"
    ) as raised:
        ppo_that_finds(error, tmp_path).check_arrival(0, LogProbDifference(mean=1.0, largest=2.0))
    assert raised.value.__cause__ is error
