"""Environments with each release's own pins, really resolved and installed by uv, from a folder of wheels."""

from pathlib import Path

from tests.tools.bisection.bisecting import Bench
from tests.tools.bisection.wheels import make_wheel

HELPER = "def work():\n    {}\n"


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
    assert "| helper | 1.0 | 2.0 |" in bench.report()
    assert "| 1.1 | skip | 3 | cannot be installed: uv: " in bench.report() and "uv venv --python 3." in bench.report()
    assert (tmp_path / "found" / "environments" / "1.2.txt").read_text() == "helper==2.0\nmoving==1.2\n"
    store = tmp_path / "cache" / "harness-bisect"
    made = {each for each in store.iterdir() if each.is_dir()}
    again = bench.bisect(*asked[:-1], "again", "--", "script.py")
    assert again.returncode == 1 and {each for each in store.iterdir() if each.is_dir()} == made, (
        "nothing is made again"
    )
    [module, _] = store.glob("moving-1.*/venv/lib/python3*/site-packages/helper/__init__.py")
    assert module.stat().st_nlink > 1, "files are linked, not copied"
