"""Every script on a Python that has nothing but its standard library: --help, wrong command lines, and which Python to
use."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = sorted(file.name for file in (REPOSITORY / "launch").glob("[!_]*.py"))


def bare(script: str, *words: str, venv: str) -> subprocess.CompletedProcess[str]:
    """Without site-packages (-S), and with HARNESS_VENV in the place of .venv."""
    python = getattr(sys, "_base_executable", sys.executable)
    command = [python, "-S", "-s", f"launch/{script}", *words]
    environment = {"PATH": "/usr/bin:/bin", "HARNESS_VENV": venv}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_printed_or_the_python_is_named(script: str) -> None:
    done = bare(script, "--help", venv="/nonexistent")
    if done.returncode == 0:
        assert f"launch/{script}" in done.stdout and done.stderr == ""
    else:
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith(f"error: launch/{script} needs ") and len(done.stderr.splitlines()) == 1
    assert done.returncode == 0 or script == "bisect_versions.py"


def test_it_continues_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = bare("hosts.py", "--help", venv=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "") and "launch/hosts.py" in done.stdout


def test_a_log_is_diagnosed(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("all is well\n")
    assert bare("diagnose.py", str(log), venv="/nonexistent").returncode == 3


@pytest.mark.parametrize("script", ["ppo.py", "sync.py", "doctor.py"])
def test_without_torchrun_the_line_to_paste_is_printed(script: str) -> None:
    done = bare(script, "configs/cpu/quickstart.toml", venv="/nonexistent")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    ranks = "--nproc-per-node=2"
    assert done.stderr.endswith(f"--nnodes=1 {ranks} launch/{script} configs/cpu/quickstart.toml\n")


@pytest.mark.parametrize(
    ("line", "needed"),
    [("repro.py list", "psutil"), ("repro.py run shared-expert-summed", "psutil"),
     ("torchrun.py --nproc-per-node=2 launch/ppo.py", "torch and psutil")],
)  # fmt: skip
def test_what_needs_packages_is_one_line(line: str, needed: str) -> None:
    script, *words = line.split()
    done = bare(script, *words, venv="/nonexistent")
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"error: launch/{script} needs {needed}, which ")


@pytest.mark.parametrize("argument", ["--task.source={dir}/rows.parquet", "--engine.args.mem_fraction_statik=0.5"])
def test_check_says_what_a_bare_python_cannot_look_at(argument: str, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").touch()
    done = bare("ppo.py", "--check", argument.format(dir=tmp_path), venv="/nonexistent")
    assert done.returncode == 0 and done.stdout.startswith("ok, as far as it was checked: ")
    assert "\nnot checked: " in done.stdout and "\nto check more: " in done.stdout


def test_check_uses_the_environment_that_there_is() -> None:
    made = str(Path(sys.prefix))
    done = bare("ppo.py", "--check", "--engine.args.mem_fraction_statik=0.5", venv=made)
    assert done.returncode == 2 and "the nearest it has is mem_fraction_static" in done.stderr
