"""A server behind HTTP takes the place of VerlEngine: the RolloutEngine protocol is all that the trainer needs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent


def on_two_ranks(script: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def test_a_server_takes_weights_in_every_way_and_both_ranks_see_its_answers(tmp_path: Path) -> None:
    on_two_ranks(HERE / "http_on_two_ranks.py", str(tmp_path))
    seen, other = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    refused = seen.pop("refused"), other.pop("refused")
    assert all("update_weights_from_disk: the server" in each for each in refused)
    assert seen == other
    first, second = seen["model0"], seen["model1 by bucket"]
    assert [token for _, token in first] != [token for _, token in second]
    for name, answers in seen.items():
        expected = first if name.startswith("model0") else second
        assert answers == [pytest.approx(entry, abs=1e-5) for entry in expected], name


def test_whole_ppo_steps_run_with_it(tmp_path: Path) -> None:
    words = ["configs/cpu/quickstart.toml", "--run.dir", str(tmp_path), "--weights.transport", "bucket"]
    done = on_two_ranks(HERE / "ppo_with.py", "tests.rollout.http_engine:HttpEngine", *words)
    verdict = done.stdout[done.stdout.index("PASSED: 3 PPO steps") :]
    assert "fingerprints were not possible, as this engine cannot be asked" in verdict
    assert "do not show a failed sync" in verdict
    rows: list[dict[str, Any]] = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert max(row["log_prob_difference_mean"] for row in rows if "log_prob_difference_mean" in row) < 1e-5
