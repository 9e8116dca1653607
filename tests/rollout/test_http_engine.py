"""A server behind HTTP takes the place of VerlEngine: the RolloutEngine protocol is all that the trainer needs.

tests/end_to_end/test_runs.py makes whole PPO steps with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("http_on_two_ranks.py")


def test_a_server_takes_weights_in_every_way_and_both_ranks_see_its_answers(tmp_path: Path) -> None:
    command = [sys.executable, "launch/torchrun.py", "--standalone", "--nproc-per-node=2", str(SCRIPT), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    seen, other = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    refused = seen.pop("refused"), other.pop("refused")
    assert all("update_weights_from_disk: the server" in each for each in refused)
    assert seen == other
    first, second = seen["model0"], seen["model1 by bucket"]
    assert [token for _, token in first] != [token for _, token in second]
    for name, answers in seen.items():
        expected = first if name.startswith("model0") else second
        assert answers == [pytest.approx(entry, abs=1e-5) for entry in expected], name
