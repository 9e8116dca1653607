"""The lines under "Reproduce with" work in a shell, as they are, and without the program that wrote them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.tools.trial.environment import uv_binary
from tests.tools.bisection.bisecting import Bench, bare_python, repository
from tests.tools.bisection.wheels import make_wheel

USE = "import moving, os, sys\nprint('ran', os.environ['BISECT_CANDIDATE'], moving.__file__)\nsys.exit(moving.code)\n"


def asked_of(source: str, folder: Path) -> list[str]:
    """Two candidates, the second one bad, from one of the sources of candidates."""
    if source == "git":
        repository(folder / "checkout", [{"python/moving/__init__.py": f"code = {code}\n"} for code in (0, 7)] + [{}])
        return ["--git", "checkout", "--good", "main~2", "--bad", "main", "--python", bare_python()]
    ends = ["--good", "1.0", "--bad", "1.1"]
    if source == "environments":
        Bench(folder).sites(["code = 0", "code = 7"])
        return ["--environments", "sites", *ends, "--python", bare_python()]
    for minor, code in enumerate((0, 7)):
        make_wheel(folder / "wheels", "moving", f"1.{minor}", f"code = {code}")
    return ["--wheels", "wheels", *ends]


def printed(report: str, heading: str) -> list[str]:
    """Return the lines of the block under a heading."""
    return report.split(f"## {heading}\n")[1].split("```")[1].strip().splitlines()


def pasted(lines: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the lines in a shell that stops at a failure; their places are in this test's own folder."""
    text = "\n".join(["set -e", *lines]).replace("/tmp/moving-", f"{folder}/place-")
    uv = Path(uv_binary()).parent
    environment = {**os.environ, "HOME": str(folder), "UV_CACHE_DIR": str(folder / "uv"), "PATH": f"{uv}:/usr/bin:/bin"}
    return subprocess.run(["bash"], input=text, cwd="/", env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("source", ["git", "environments", "wheels"])
def test_both_sides_from_the_report(tmp_path: Path, source: str) -> None:
    """The command is a shell script that calls the python of PATH, in a folder with a space in its name."""
    if source == "git" and shutil.which("git") is None:
        pytest.skip("there is no git")
    folder = tmp_path / "a folder"
    folder.mkdir()
    bench = Bench(folder, {"UV_CACHE_DIR": str(tmp_path / "uv"), "UV_OFFLINE": "1"})
    (folder / "use.py").write_text(USE)
    (folder / "run.sh").write_text("python use.py\n")
    asked = asked_of(source, folder)
    run = bench.bisect(*asked, "--package", "moving", "--dir", "found", "--", "bash", "run.sh")
    assert run.returncode == 0, run.stdout + run.stderr
    lines = printed(bench.report(), "Reproduce with")
    bad = next(at for at, line in enumerate(lines) if line.startswith("# bad: "))
    names = [each["name"] for each in bench.state()["candidates"]]
    for side, code, name in ((lines[:bad], 0, names[0]), (lines[bad:], 7, names[1])):
        again = pasted(side, tmp_path)
        assert again.returncode == code and f"ran {name} " in again.stdout, again.stdout + again.stderr
        place = folder / "sites" if source == "environments" else tmp_path / f"place-{name[:12]}"
        assert f"ran {name} {place}" in again.stdout, again.stdout
    if source == "git":
        assert "Confirmed: " in run.stdout, run.stdout
        again = pasted(printed(bench.report(), "The commit reverted"), tmp_path)
        assert again.returncode == 0 and f"-without-{names[1][:12]} " in again.stdout, again


@pytest.mark.parametrize("source", ["sites", "venvs"])
def test_a_script_of_this_repository(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports harness in an environment without it, and PYTHONPATH is printed for that.

    Also where launch/bisect_versions.py has put the same value there for itself.
    """
    bench, script = Bench(tmp_path), str(Path(__file__).with_name("import_harness.py"))
    if source == "sites":
        monkeypatch.delenv("PYTHONPATH", raising=False)
        bench.sites(["code = 0", "code = 7"])
    else:
        for minor, code in enumerate((0, 7)):
            place = tmp_path / "venvs" / f"1.{minor}"
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
            [site] = place.glob("lib/python3*/site-packages")
            (site / "moving.py").write_text(f"code = {code}")
    asked = ["--package", "moving", "--environments", source, "--good", "1.0", "--bad", "1.1", "--dir", "found"]
    run = bench.bisect(*asked, "--python", bare_python(), "--", script)
    assert run.returncode == 0 and "The first bad release is 1.1; the last good one is 1.0." in run.stdout, run.stdout
    assert "SystemExit" not in run.stdout and "7 in harness" in (tmp_path / "found/runs/1.1/1/log.txt").read_text()
    again = pasted(printed(bench.report(), "Reproduce with"), tmp_path)
    assert again.returncode == 7 and "0 in harness" in again.stdout, again.stdout + again.stderr
