"""Scripts that are started in a folder of somebody else import nothing from it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.bisection.bisecting import Bench, bare_python
from tests.tools.report.fake_run import fake_run

REPOSITORY = Path(__file__).parents[2]
IMPORTED = "torch", "harness", "msgspec", "psutil", "packaging", "numpy", "json", "signal", "sitecustomize"
VERL = "python3 -m verl.trainer.main_ppo data.train_batch_size=64 actor_rollout_ref.rollout.name=sglang\n"
BISECT = "--package moving --environments sites --python {bare_python} --good 1.0 --bad 1.1"
SCRIPTS = {
    # Name -> the command line, its exit code, and what shows how far it came.
    "quickstart": ("quickstart.py --run.dir /proc/nowhere", 2, "run.dir = /proc/nowhere cannot be made"),
    "ppo": ("ppo.py --check --engine.device cpu", 0, "ok: 2 ranks"),
    "report": ("report.py run", 0, "report run/report.md"),
    "export": ("export.py run", 0, "sglang.Engine"),
    "diagnose": ("diagnose.py run.log", 1, "run.log:1: RuntimeError: planted"),
    "from_verl": ("from_verl.py run.sh", 1, "unsupported, 0 unknown"),
    "repro": ("repro.py run illegal-cuda-visible-devices", 1, "reproduced: "),
    "bisect": (f"bisect_versions.py {BISECT} -- theirs/moved.py", 0, "The first bad release is 1.1"),
    "hosts": ("hosts.py --hosts 2 --isolation processes -- theirs/job.py", 0, "host1 | ran as a rank"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what the scripts are given, and modules that must not be imported. theirs: programs of a user."""
    fake_run(tmp_path / "run", ranks=2)
    Bench(tmp_path).sites(["code = 0", "code = 1"])
    (tmp_path / "run.log").write_text("RuntimeError: planted\n")
    (tmp_path / "run.sh").write_text(VERL)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "job.py").write_text("print('ran as a rank')")
    (tmp_path / "theirs" / "moved.py").write_text("import moving, sys\nsys.exit(moving.code)")
    for name in IMPORTED:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    return tmp_path


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.long] * (each == "export")) for each in SCRIPTS]
)
def test_nothing_of_the_current_folder_is_imported(name: str, folder: Path) -> None:
    line, code, shown = SCRIPTS[name]
    script, *words = line.format(bare_python=bare_python()).split()
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "HARNESS_VENV": "none",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "launch" / script), *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    said = done.stdout + done.stderr
    assert "imported from the current folder" not in said, said
    assert "ModuleNotFoundError" not in done.stderr, done.stderr
    assert done.returncode == code and shown in said, said
