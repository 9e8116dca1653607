"""PPO learns: a toy task that a 2-layer model masters on the CPU."""

from pathlib import Path

import pytest

from tests.end_to_end.launching import run

pytestmark = pytest.mark.long


def test_the_mean_reward_rises_from_under_02_to_over_08(tmp_path: Path) -> None:
    job = run(tmp_path / "run", 2, "configs/cpu/digits.toml")
    assert job.process.returncode == 0, job.output()
    rewards = [step["reward_mean"] for step in job.metrics() if "step" in step]
    assert len(rewards) <= 60
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.8
    assert all("critic/explained_variance" in step for step in job.metrics()[: len(rewards)])
