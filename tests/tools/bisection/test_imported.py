"""A command that would run something other than the candidate is refused, and it is said what it would run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.tools.bisection.imported import entry_folders
from harness.tools.bisection.question import Options, Question
from tests.tools.bisection.bisecting import REPOSITORY, Bench, bare_python
from tests.tools.bisection.test_git import git, made
from tests.tools.bisection.wheels import make_wheel

SITES = ["--package", "moving", "--environments", "sites", "--good", "1.0", "--bad", "1.3", "--dir", "found"]
USE = "import moving, sys\nsys.exit(moving.code)"
TEST = "import moving\ndef test_it():\n    assert moving.code == 0\n"


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


def refusal(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 2 and run.stderr.count("\n") == 1, run.stdout + run.stderr
    return run.stderr


def test_a_script_in_a_flat_checkout(tmp_path: Path) -> None:
    """The package's own working tree lies next to the script, so that every commit would pass or fail as it does."""
    bench = Bench(tmp_path / "checkout" / "python")
    checkout = made(tmp_path / "checkout", ["code = 0\n", "code = 1\n"])
    bench.script(USE)
    asked = ["--git", str(checkout), "--package", "moving", "--good", "main~1", "--bad", "main"]
    run = bench.bisect(*asked, "--python", bare_python(), "--dir", str(tmp_path / "found"), "--", "script.py")
    hidden = checkout / "python" / "moving" / "__init__.py"
    said = refusal(run)
    assert "the good end " in said and f"the command would import moving from {hidden}, and not from " in said
    assert "move the script out of that folder" in said and not bench.ran()


@pytest.mark.parametrize("command", ["python -m script", "python -c pass", "torchrun script.py", "python -u script.py"])
def test_the_current_folder(bench: Bench, command: str) -> None:
    put(bench.folder / "moving.py", "code = 0")
    bench.script(USE)
    run = bench.bisect(*SITES, "--python", bare_python(), "--", *command.split())
    assert f"would import moving from {bench.folder / 'moving.py'}, and not from " in refusal(run) and not bench.ran()


def test_python_can_be_told_to_leave_the_folder_out(bench: Bench) -> None:
    put(bench.folder / "moving.py", "code = 0")
    run = bench.bisect(*SITES, "--python", sys.executable, "--", "python", "-P", bench.script(USE))
    assert run.returncode == 0 and "The first bad release is 1.2;" in run.stdout, run.stdout + run.stderr


def test_a_python_that_ignores_the_path_of_the_candidate(bench: Bench) -> None:
    run = bench.bisect(*SITES, "--python", bare_python(), "--", "python", "-I", bench.script(USE))
    assert "would not find moving in " in refusal(run) and "leave out -I" in run.stderr


def test_a_folder_of_pythonpath_that_hides_what_is_installed(tmp_path: Path) -> None:
    """The version is that of the candidate, because the folder has no metadata."""
    bench = Bench(tmp_path, {"UV_CACHE_DIR": str(tmp_path / "uv"), "PYTHONPATH": str(tmp_path / "mine")})
    hidden = put(tmp_path / "mine" / "moving" / "__init__.py", "code = 1")
    for minor in range(2):
        make_wheel(tmp_path / "wheels", "moving", f"1.{minor}", f"code = {minor}")
    asked = ["--package", "moving", "--wheels", "wheels", "--good", "1.0", "--bad", "1.1"]
    said = refusal(bench.bisect(*asked, "--", bench.script(USE)))
    assert f"would import moving from {hidden}" in said and "take it off PYTHONPATH" in said and not bench.ran()


def test_a_checkout_whose_package_is_elsewhere(tmp_path: Path) -> None:
    """The installed package would be tested with every commit; the folder of the package is given instead."""
    bench, checkout = Bench(tmp_path), tmp_path / "checkout"
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    [site] = (tmp_path / "venv").glob("lib/python3*/site-packages")
    put(site / "moving.py", "code = 0")
    git(tmp_path, "init", "-q", "-b", "main", str(checkout))
    for code in range(2):
        put(checkout / "libs" / "moving" / "__init__.py", f"code = {code}\n")
        git(checkout, "add", "--all")
        git(checkout, "commit", "-q", "-m", f"commit {code}")
    asked = ["--package", "moving", "--good", "main~1", "--bad", "main", "--python", str(python)]
    said = refusal(bench.bisect("--git", "checkout", *asked, "--", bench.script(USE)))
    assert f"it has no moving, so that {site / 'moving.py'} would be tested; give --git the folder" in said
    run = bench.bisect("--git", "checkout/libs", *asked, "--", "script.py")
    assert run.returncode == 0 and "commit 1; the last good one is" in run.stdout, run.stdout + run.stderr


def test_pytest_of_the_candidates_python(bench: Bench) -> None:
    """In a flat checkout too, as long as pytest does not put its folder on the path."""
    put(bench.folder / "moving.py", "code = 0")
    put(bench.folder / "tests" / "test_it.py", TEST)
    bench.environment["PATH"] = "/usr/bin:/bin"
    command = ["pytest", "-p", "no:cacheprovider", "tests/test_it.py::test_it"]
    run = bench.bisect(*SITES, "--python", sys.executable, "--", *command)
    assert run.returncode == 0 and "The first bad release is 1.2;" in run.stdout, run.stdout + run.stderr


@pytest.mark.parametrize("name", ["tests/__init__.py", "conftest.py"])
@pytest.mark.parametrize("command", ["pytest tests/test_it.py", "python -P -m pytest tests"])
def test_pytest_in_a_flat_checkout(bench: Bench, name: str, command: str) -> None:
    """pytest itself puts the checkout first on the path, because of a package of tests or a conftest.py."""
    hidden = put(bench.folder / "moving.py", "code = 0")
    put(bench.folder / "tests" / "test_it.py", TEST)
    put(bench.folder / name, "")
    run = bench.bisect(*SITES, "--python", sys.executable, "--", *command.split())
    assert f"would import moving from {hidden}" in refusal(run)


def test_pytest_that_the_candidate_lacks(bench: Bench) -> None:
    put(bench.folder / "test_it.py", TEST)
    bench.environment["PATH"] = "/usr/bin:/bin"
    bin_folder = Path(bare_python()).parent
    run = bench.bisect(*SITES, "--python", bare_python(), "--", "pytest", "test_it.py")
    assert f"there is no pytest in {bin_folder} or on PATH; add it with {bare_python()} -m pip install" in refusal(run)
    shim = put(bench.folder / "shims" / "pytest", "#!/usr/bin/env bash\nexit 0\n")
    shim.chmod(0o755)
    bench.environment["PATH"] = f"{shim.parent}:/usr/bin:/bin"
    run = bench.bisect(*SITES[:-2], "--python", bare_python(), "--", "pytest", "test_it.py")
    assert f"there is no pytest in {bin_folder}, and {shim} may run another Python; add it with" in refusal(run)


@pytest.mark.parametrize(
    "head", ["#!{python}\n", "#!/usr/bin/env python3\n", "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n"]
)
def test_a_program_that_another_python_runs(bench: Bench, head: str) -> None:
    """Next to that Python, the candidate's packages would not be found."""
    program = put(bench.folder / "bin" / "mytest", head.format(python=sys.executable) + USE)
    program.chmod(0o755)
    bench.environment["PATH"] = f"{program.parent}:{os.environ['PATH']}"
    run = bench.bisect(*SITES, "--python", bare_python(), "--", "mytest")
    if "env" in head:  # the first python3 on PATH is the candidate's
        assert run.returncode == 0 and "The first bad release is 1.2;" in run.stdout, run.stdout + run.stderr
        return
    said = (
        f"{program} runs with {sys.executable}, and not with the candidate's {bare_python()}; give: -- python {program}"
    )
    assert said in refusal(run)
    python = ["--python", bare_python()]
    assert said in refusal(bench.bisect(*SITES[:-2], *python, "--", "bin/mytest"))
    run = bench.bisect(*SITES[:-2], *python, "--dir", "third", "--", str(Path(sys.executable).with_name("pytest")))
    assert f"give it as pytest, and add it with {bare_python()} -m pip install pytest." in refusal(run)


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
    assert "SKIP  1.2: would not be tested: there is no pytest in " in run.stdout


@pytest.mark.parametrize(
    ("command", "folders"),
    [
        ("sub/a.py", ["sub"]),
        ("python sub/a.py -m x", ["sub"]),
        ("python -u sub/a.py -m x", ["sub"]),
        ("python -Pu sub/a.py", []),
        ("python -m pkg sub/a.py", ["."]),
        ("torchrun --nproc-per-node=2 sub/a.py", ["sub"]),
        ("torchrun -m pkg sub/a.py", ["."]),
        ("python -m torch.distributed.run sub/a.py", ["sub"]),
        (f"{REPOSITORY}/launch/torchrun.py sub/a.py", ["sub"]),
        ("bash sub/run.sh sub/a.py", []),
        ("pytest", ["."]),
        ("pytest -q sub/a.py", ["sub"]),
        ("pytest -q --import-mode=importlib sub/a.py", []),
        ("pytest sub/deep", ["sub"]),
        ("python -m pytest sub/deep/a.py::test", [".", "sub"]),
    ],
)
def test_what_python_puts_first_on_the_path(tmp_path: Path, command: str, folders: list[str]) -> None:
    for name in ("sub/a.py", "sub/deep/a.py", "sub/deep/__init__.py"):
        put(tmp_path / name, "")
    question = Question(options=Options(), command=tuple(command.split()), folder=str(tmp_path))
    assert entry_folders(question) == [tmp_path / each for each in folders]
