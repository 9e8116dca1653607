"""Every script on a Python that has nothing but its standard library: --help, wrong command lines, and which Python to use."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = sorted(file.name for file in (REPOSITORY / "launch").glob("[!_]*.py") if file.name != "minimal.py")


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
    assert done.returncode == 0 or script in ("bisect_versions.py", "hosts.py", "memory.py")


def test_it_continues_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = bare("memory.py", "--help", venv=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "") and "--resolution" in done.stdout


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
    ("script", "words"),
    [("export.py", ()), ("report.py", ()), ("diagnose.py", ()), ("diagnose.py", ("--jsn", "x")), ("repro.py", ("rnu",)),
     ("sync.py", ("--syncs", "many"))],
)  # fmt: skip
def test_a_wrong_command_line_is_one_line(script: str, words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, f"launch/{script}", *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
