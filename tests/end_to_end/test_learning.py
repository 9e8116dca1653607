"""PPO learns: toy tasks that a 2-layer model masters on the CPU. Each run takes minutes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.launching import REPOSITORY, run

pytestmark = pytest.mark.long


def test_the_mean_reward_rises_from_under_02_to_over_08(tmp_path: Path) -> None:
    job = run(tmp_path / "run", 2, "configs/cpu/digits.toml")
    assert job.process.returncode == 0, job.output()
    rewards = [step["reward_mean"] for step in job.metrics() if "step" in step]
    assert len(rewards) <= 60
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.8
    assert all("critic/explained_variance" in step for step in job.metrics()[: len(rewards)])


def test_addition_of_pairs_never_trained_on_rises_to_09(tmp_path: Path) -> None:
    prepare = [sys.executable, "launch/prepare_data.py", "addition", str(tmp_path)]
    subprocess.run(prepare, cwd=REPOSITORY, check=True, timeout=300)
    here = ["--task.source", str(tmp_path), "--validation.source", str(tmp_path), "--model.name", f"{tmp_path}/model"]
    job = run(tmp_path / "run", 2, "configs/cpu/addition.toml", *here, seconds=1800)
    assert job.process.returncode == 0, job.output()
    accuracies = [row["validation/accuracy"] for row in job.metrics() if row["kind"] == "validation"]
    assert accuracies[0] < 0.3
    assert accuracies[-1] >= 0.9
