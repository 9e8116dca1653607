"""From a verl command to a verdict: the command that launch/from_verl.py prints is run as it is printed."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.launching import REPOSITORY

SCRIPT = REPOSITORY / "tests" / "tools" / "verl" / "commands" / "two-hosts-dp1-tp4.sh"
SMALLER = ("trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
"""Two ranks instead of four."""


def python(*words: str | Path, seconds: float) -> str:
    """Return the output of a script that ended with exit code 0."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_a_verl_command_on_two_emulated_hosts_passes(tmp_path: Path) -> None:
    config = tmp_path / "tiny.toml"
    options = ["--release", "0.7", "--tiny", "--hosts", "2", "--out", config]
    said = python("launch/from_verl.py", *options, SCRIPT, *SMALLER, seconds=60)
    printed = [shlex.split(line[2:]) for line in said.splitlines() if line.startswith("+ ")]
    python3, *words = printed[-1]
    assert (python3, words[0], words[-1]) == ("python3", "launch/hosts.py", str(config))
    output = python(*words, "--run.dir", tmp_path / "run", seconds=900)
    assert "2 ranks on 2 hosts (cpu), mesh dp=1 tp=2 pp=1" in output and "PASSED: 3 PPO steps; 4 weight syncs" in output
    events = [json.loads(line) for line in (tmp_path / "run" / "events" / "rank0.jsonl").read_text().splitlines()]
    calls = [each["call"] for each in events if each["event"] == "engine_call"]
    assert 30 < calls.count("generate") < 50, "responses of one token make no baseline of hundreds of rollouts"
    assert "validation after 0 updates, 8 rows" in output and "validation after 3 updates, 8 rows" in output
