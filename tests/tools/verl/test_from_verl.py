"""launch/from_verl.py: a command, a script or the config that verl prints; where the config goes; exit codes."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from harness.tools.environments import REPOSITORY

COMMANDS = Path(__file__).with_name("commands")
SCRIPT, PRINTED = COMMANDS / "two-hosts-dp1-tp4.sh", COMMANDS / "sequence-balance-comparison.yaml"
WORDS = ["actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.actor.use_dynamic_bsz=True"]


def run(*words: str | Path, bare: bool = True) -> subprocess.CompletedProcess[str]:
    """Run on a Python with nothing but its standard library, unless `bare` is false."""
    command = [sys.executable, *(["-S"] if bare else []), REPOSITORY / "launch" / "from_verl.py", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_script_and_its_arguments_to_a_file(tmp_path: Path) -> None:
    out = tmp_path / "run.toml"
    done = run(
        "--release", "0.7", "--hosts", "2", "--out", out, SCRIPT, "trainer.total_epochs=1", "data.train_batch_size=512"
    )
    assert done.returncode == 0, done.stderr
    table = tomllib.loads(out.read_text())
    assert table["rollout"]["prompts_per_step"] == 512 and table["parallel"] == {"dp": 1, "tp": 4}
    assert f"+ python3 launch/hosts.py --hosts 2 --ranks-per-host 2 -- launch/ppo.py {out}" in done.stdout.splitlines()
    assert "0 unsupported, 0 unknown" in done.stdout and not done.stderr


def test_a_command_to_standard_output_with_the_summary_beside_it() -> None:
    done = run("--", "python3", "-m", "verl.trainer.main_ppo", *WORDS, "data.no_such_key=1")
    assert done.returncode == 1
    assert tomllib.loads(done.stdout)["engine"]["preset"] == "sglang"
    assert "unknown: data.no_such_key=1: " in done.stderr and "# unknown: data.no_such_key=1: " in done.stdout


@pytest.mark.parametrize("tiny", [["--tiny"], ["--tiny", "llama"]], ids=["by-path", "by-name"])
def test_tiny(tiny: list[str]) -> None:
    done = run(*tiny, "--release", "0.4", SCRIPT)
    assert done.returncode == 0, done.stderr
    assert tomllib.loads(done.stdout)["model"]["name"] == ("llama" if len(tiny) == 2 else "qwen2")
    assert "verl 0.4 (as asked)" in done.stderr


def test_the_config_that_verl_prints() -> None:
    done = run(PRINTED, bare=False)
    assert done.returncode == 0, done.stderr
    assert tomllib.loads(done.stdout)["rollout"]["prompts_per_step"] == 2048 and "verl 0.3 printed" in done.stderr
