"""Scripts that are started in a folder of somebody else import nothing from it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
IMPORTED = "torch", "harness", "msgspec", "psutil", "packaging", "numpy", "json", "signal", "sitecustomize"
SCRIPTS = {
    "quickstart.py": ("--run.dir", "/proc/nowhere"),
    "ppo.py": ("--check",),
    "report.py": ("runs",),
    "export.py": ("runs",),
    "diagnose.py": ("run.log",),
    "from_verl.py": ("run.sh",),
    "repro.py": ("list",),
    "bisect_versions.py": ("--good", "1", "--bad", "2", "--", "nothing.py"),
    "hosts.py": ("--hosts", "0", "--", "launch/doctor.py"),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_nothing_of_the_current_folder_is_imported(script: str, tmp_path: Path) -> None:
    for name in IMPORTED:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    (tmp_path / "run.log").write_text("RuntimeError: planted\n")
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "HARNESS_VENV": "none"}
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "launch" / script), *SCRIPTS[script]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert "imported from the current folder" not in done.stdout + done.stderr, done.stderr
    assert "ModuleNotFoundError" not in done.stderr, done.stderr
