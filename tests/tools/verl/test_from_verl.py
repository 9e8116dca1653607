"""launch/from_verl.py writes a file; tests/said/from_verl.txt has what it prints."""

import subprocess
import sys
import tomllib
from pathlib import Path

from harness.tools.environments import REPOSITORY

SCRIPT = Path(__file__).parent / "commands" / "two-hosts-dp1-tp4.sh"


def test_a_bare_python_writes_the_config_of_a_script_and_its_arguments(tmp_path: Path) -> None:
    out = tmp_path / "run.toml"
    words = [
        "--release",
        "0.7",
        "--hosts",
        "2",
        "--out",
        out,
        SCRIPT,
        "trainer.total_epochs=1",
        "data.train_batch_size=512",
    ]
    command = [sys.executable, "-S", REPOSITORY / "launch" / "from_verl.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    table = tomllib.loads(out.read_text())
    assert table["rollout"]["prompts_per_step"] == 512 and table["parallel"] == {"dp": 1, "tp": 4}
    assert f"+ python3 launch/hosts.py --hosts 2 --ranks-per-host 2 -- launch/ppo.py {out}" in done.stdout.splitlines()
    assert "0 unsupported, 0 unknown" in done.stdout and not done.stderr
