"""Environments with each release's own pins, really resolved and installed by uv, from a folder of wheels."""

from pathlib import Path

import pytest

from tests.tools.bisection.bisecting import Bench
from tests.tools.bisection.wheels import make_wheel

HELPER = "def work():\n    {}\n"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Releases 1.0 to 1.11 of `moving`: 1.3 and 1.4 want what is not there, and 1.7 on another `helper`, which breaks
    it."""
    wheels = tmp_path / "wheels"
    for minor in range(12):
        helper = "helper==3.0" if minor in (3, 4) else "helper==2.0" if minor >= 7 else "helper==1.0"
        make_wheel(
            wheels,
            "moving",
            f"1.{minor}",
            "import helper\nwork = helper.work",
            requires=[helper],
            requires_python=">=3.8",
        )
    make_wheel(wheels, "moving", "1.6.post1", "import helper\nwork = helper.work", requires=["helper==1.0"])
    make_wheel(wheels, "moving", "1.9rc1", "")
    make_wheel(wheels, "helper", "1.0", HELPER.format("return 1"))
    make_wheel(wheels, "helper", "2.0", HELPER.format("raise TypeError('no such argument')"))
    made = Bench(tmp_path)
    made.environment["UV_CACHE_DIR"] = str(tmp_path / "uv")
    return made


def test_a_few_releases_with_their_own_pins(tmp_path: Path) -> None:
    wheels, bench = tmp_path / "wheels", Bench(tmp_path, {"UV_CACHE_DIR": str(tmp_path / "uv")})
    for minor, helper in enumerate(("1.0", "3.0", "2.0")):
        make_wheel(wheels, "moving", f"1.{minor}", "import helper\nwork = helper.work", requires=[f"helper=={helper}"])
    make_wheel(wheels, "helper", "1.0", HELPER.format("return 1"))
    make_wheel(wheels, "helper", "2.0", HELPER.format("raise TypeError('no such argument')"))
    asked = ["--package", "moving", "--wheels", "wheels", "--good", "1.0", "--bad", "1.2", "--dir", "found"]
    run = bench.bisect(*asked, "--", bench.script("import moving\nmoving.work()"))
    assert run.returncode == 1, run.stdout + run.stderr
    assert "SKIP  1.1: cannot be installed: uv: " in run.stdout and "is one of 2: 1.1, 1.2." in run.stdout
    assert "| helper | 1.0 | 2.0 | likely suspect |" in bench.report()
    assert "| 1.1 | skip | 3 | cannot be installed: uv: " in bench.report() and "uv venv --python 3." in bench.report()


@pytest.mark.long
def test_what_cannot_be_installed_is_straddled_and_another_package_suspected(bench: Bench) -> None:
    asked = ["--package", "moving", "--wheels", "wheels", "--good", "1.0", "--bad", "1.11", "--dir", "found"]
    run = bench.bisect(*asked, "--", bench.script("import moving\nmoving.work()"))
    assert run.returncode == 0, run.stdout + run.stderr
    assert "The first bad release is 1.7; the last good one is 1.6.post1." in run.stdout
    report = bench.report()
    assert "| helper | 1.0 | 2.0 | likely suspect |" in report
    assert (bench.folder / "found" / "environments" / "1.7.txt").read_text() == "helper==2.0\nmoving==1.7\n"
    # Nothing is installed again, and files are linked, not copied.
    store = bench.folder / "cache" / "harness-bisect"
    made = sorted(each.name for each in store.iterdir() if each.is_dir())
    again = bench.bisect(*asked[:-1], "again", "--", "script.py")
    assert again.returncode == 0 and sorted(each.name for each in store.iterdir() if each.is_dir()) == made
    module = next(store.glob("moving-1.7-*/venv/lib/python3*/site-packages/helper/__init__.py"))
    assert module.stat().st_nlink > 1


@pytest.mark.long
def test_an_end_that_cannot_be_installed_is_refused_and_it_is_said_why(bench: Bench) -> None:
    asked = ["--package", "moving", "--wheels", "wheels", "--good", "1.0", "--bad", "1.4"]
    run = bench.bisect(*asked, "--", bench.script("import moving"))
    assert run.returncode == 2, run.stdout + run.stderr
    assert (
        "the bad end 1.4 could not be classified: cannot be installed: uv: Because there is no version of helper==3.0"
        in run.stderr
    )
    assert run.stderr.rstrip().count("\n") == 0
