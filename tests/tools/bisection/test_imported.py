"""A command that would run something other than the candidate is refused, and it is said what it would run."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness.tools.bisection.imported import imported_by
from harness.tools.bisection.question import Options, Question
from harness.tools.trial.environment import Environment
from harness.tools.trial.trial import Trial
from tests.tools.bisection.bisecting import Bench, bare_python, repository

SITES = ["--package", "moving", "--environments", "sites", "--good", "1.0", "--bad", "1.3", "--dir", "found"]
USE = "import moving, sys\nsys.exit(moving.code)"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """1.2 is the first bad one."""
    bench = Bench(tmp_path)
    bench.sites(["code = 0", "code = 0", "code = 1", "code = 1"])
    return bench


def put(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_a_script_in_a_flat_checkout(tmp_path: Path) -> None:
    """The package's own working tree lies next to the script, so that every commit passes or fails as it does."""
    bench, checkout = Bench(tmp_path / "checkout" / "python"), tmp_path / "checkout"
    repository(checkout, [{"python/moving/__init__.py": f"code = {code}\n"} for code in (0, 1)])
    bench.script(USE)
    asked = ["--git", str(checkout), "--package", "moving", "--good", "main~1", "--bad", "main"]
    run = bench.bisect(*asked, "--python", bare_python(), "--dir", str(tmp_path / "found"), "--", "script.py")
    hidden = checkout / "python" / "moving" / "__init__.py"
    assert run.returncode == 2 and run.stderr.count("\n") == 1, run.stdout + run.stderr
    assert "the good end " in run.stderr and f"moving is {hidden}" in run.stderr


@pytest.mark.parametrize(
    ("command", "hidden"),
    [
        ("python -m script", True),
        ("python sub/script.py", False),
        ("python -P script.py", False),
        ("torchrun script.py", True),
        ("bash run.sh", True),
    ],
)
def test_the_folder_that_goes_first(tmp_path: Path, command: str, hidden: bool) -> None:
    for name in ("moving.py", "script.py", "sub/script.py", "re.py", "site/moving.py"):
        put(tmp_path / name, "raise SystemExit('not to be run')")
    question = Question(options=Options(package="moving"), command=tuple(command.split()), folder=str(tmp_path))
    environment = Environment(python=bare_python(), paths=(str(tmp_path / "site"),))
    trial = Trial(
        command=(), variables=environment.variables(cpu_mode=False), cwd=tmp_path, folder=tmp_path, package="moving"
    )
    assert (
        imported_by(trial, environment.python, question)
        == f"moving is {tmp_path / ('moving.py' if hidden else 'site/moving.py')}"
    )


def test_a_python_that_ignores_the_path_of_the_candidate(bench: Bench) -> None:
    run = bench.bisect(*SITES, "--python", bare_python(), "--", "python", "-I", bench.script(USE))
    assert run.returncode == 2 and "moving is not found" in run.stderr


def test_a_candidate_in_between_is_skipped(bench: Bench) -> None:
    """1.2 has no pytest; the others have a program of that name."""
    for minor in range(4):
        place = bench.folder / "venvs" / f"1.{minor}"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
        [site] = place.glob("lib/python3*/site-packages")
        put(site / "moving.py", f"code = {int(minor > 1)}")
        if minor != 2:
            put(place / "bin" / "pytest", f"#!{place}/bin/python\n{USE}").chmod(0o755)
    bench.environment["PATH"] = "/usr/bin:/bin"
    ends = ["--good", "1.0", "--bad", "1.3"]
    run = bench.bisect("--package", "moving", "--environments", "venvs", *ends, "--", "pytest")
    assert run.returncode == 1 and "is one of 2: 1.2, 1.3." in run.stdout, run.stdout + run.stderr
    assert "SKIP  1.2: there is no pytest in " in run.stdout
