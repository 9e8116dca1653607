"""A layer that stands for others predicts the same as each of them does when it is traced itself."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]


def test_a_layer_stands_for_its_like() -> None:
    command = [sys.executable, "-m", "tests.tools.verify.predictions", "deepseek_v3", "2", "2"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 2
