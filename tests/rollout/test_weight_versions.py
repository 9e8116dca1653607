"""A response that was generated with other weights than this step's ends a real run."""

from pathlib import Path

import pytest

from tests.end_to_end.launching import QUICKSTART, run


@pytest.mark.long
def test_a_run_whose_responses_come_from_old_weights_fails_in_one_sentence(tmp_path: Path) -> None:
    words = ["tests.rollout.engine_of_old_weights:EngineOfOldWeights", QUICKSTART]
    job = run(tmp_path / "run", 2, *words, script="tests/rollout/ppo_with.py", launcher="plain")
    assert job.process.returncode != 0
    [first, *_] = [line for line in job.output().splitlines() if "StaleWeights" in line]
    assert "of version 0, but this step's sync brought version 1: the weights are stale" in first
    assert len(job.metrics()) == 1 and job.left_behind() == []
