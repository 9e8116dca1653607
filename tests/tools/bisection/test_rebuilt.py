"""What was built again under the same name is installed again, and a bisect goes on with the Python that it began with."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from harness.tools.bisection.local_builds import find_builds
from tests.tools.bisection.bisecting import SCRIPT, Bench, bare_python
from tests.tools.bisection.wheels import make_wheel


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, {"UV_CACHE_DIR": str(tmp_path / "uv"), "UV_OFFLINE": "1"})


def first_bad(bench: Bench, script: str, folder: str, *words: str) -> str:
    asked = ["--package", "moving", "--wheels", "wheels", "--good", "1.0", "--bad", "1.2", "--dir", folder, *words]
    run = bench.bisect(*asked, "--", script)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.partition("The first bad release is ")[2].partition(";")[0]


@pytest.mark.parametrize("words", [("--only-package", "--python", bare_python()), ()], ids=["alone", "pinned"])
def test_a_wheel_that_is_built_again(bench: Bench, words: tuple[str, ...]) -> None:
    """The same path and version; the other wheels are not installed again."""
    wheels, script = bench.folder / "wheels", bench.script("import moving, sys\nsys.exit(moving.code)")
    for minor in range(3):
        make_wheel(wheels, "moving", f"1.{minor}", f"code = {int(minor > 1)}")
    assert first_bad(bench, script, "first", *words) == "1.2"
    make_wheel(wheels, "moving", "1.1", "code = 1")
    assert first_bad(bench, script, "second", *words) == "1.1"
    store = [each.name for each in (bench.folder / "cache" / "harness-bisect").iterdir() if each.is_dir()]
    assert [sum(f"moving-1.{minor}-" in each for each in store) for minor in range(3)] == [1, 2, 1], store


def test_a_dependency_that_is_built_again(bench: Bench) -> None:
    """Back and forth: what uv has cached of it is an older build each time."""
    wheels, script = bench.folder / "wheels", bench.script("import moving, helper\nassert moving.code < helper.limit")
    for minor in range(3):
        make_wheel(wheels, "moving", f"1.{minor}", f"code = {minor}", requires=["helper==1.0"])
    for number, limit in enumerate((2, 1, 2)):
        make_wheel(wheels, "helper", "1.0", f"limit = {limit}")
        assert first_bad(bench, script, f"found-{number}") == f"1.{limit}"


def test_the_builds_of_every_folder_count(tmp_path: Path) -> None:
    """Also those that pip's configuration names, and local builds; other versions and packages do not."""

    def digest() -> str:
        folders = str(tmp_path / "one"), (tmp_path / "a b").as_uri()
        sources = [word for folder in folders for word in ("--find-links", folder)]
        return find_builds(tmp_path, sources, {"Moving.Thing": "1.0", "helper": "2.0"}).key()

    seen = [digest()]
    for folder, name, version in (
        ("one", "moving-thing", "1.0"),
        ("a b", "helper", "2.0"),
        ("one", "helper", "2.0+cpu"),
    ):
        for code in ("code = 0", "code = 1"):
            make_wheel(tmp_path / folder, name, version, code)
            seen.append(digest())
    assert len(set(seen)) == 7
    make_wheel(tmp_path / "one", "moving-thing", "1.1", "")
    make_wheel(tmp_path / "one", "other", "1.0", "")
    assert digest() == seen[-1]


def test_a_resumed_bisect_keeps_its_python(bench: Bench, tmp_path: Path) -> None:
    """Whatever Python resumes it, candidates run with the first one, while it is what it was."""
    other = tmp_path / "other"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(other)], check=True)
    [site] = other.glob("lib/python3*/site-packages")
    (site / "shared.pth").write_text(sysconfig.get_path("purelib"))
    bench.environment["PATH"] = "/usr/bin:/bin"  # this Python has no uv, and needs none
    bench.sites(["code = 0", "code = 0", "code = 1", "code = 1"])
    asked = ["--package", "moving", "--environments", "sites", "--good", "1.0", "--bad", "1.3", "--dir", "found"]
    script = bench.script(
        "import moving, os, sys\nprint(sys.executable)\nsys.exit(moving.code if os.path.exists('calm') else 200)"
    )
    assert bench.bisect(*asked, "--", script).returncode == 4
    (tmp_path / "calm").touch()
    state = tmp_path / "found" / "state.json"
    kept = json.loads(state.read_text())
    version = ".".join(map(str, sys.version_info[:3]))
    assert (kept["python"], kept["python_version"]) == (sys.executable, version)

    def resume() -> subprocess.CompletedProcess[str]:
        command = [str(other / "bin" / "python"), str(SCRIPT), "--resume", "found"]
        return subprocess.run(command, cwd=tmp_path, env=bench.variables(), capture_output=True, text=True)

    for change, sentence in (
        (
            {"python_version": "3.99.1"},
            f"began with Python 3.99.1 of {sys.executable}, which is now {version}; start a new",
        ),
        (
            {"python": "/nowhere/python"},
            "/nowhere/python does not start: No such file or directory; start a new bisect",
        ),
    ):
        state.write_text(json.dumps(kept | change))
        run = resume()
        assert run.returncode == 2 and sentence in run.stderr and run.stderr.count("\n") == 1, run.stdout + run.stderr
    state.write_text(json.dumps(kept))
    run = resume()
    assert run.returncode == 0 and "first bad release is 1.2;" in run.stdout, run.stdout + run.stderr
    logs = [file.read_text() for file in (tmp_path / "found" / "runs").glob("*/*/log.txt")]
    assert set(logs) == {f"{sys.executable}\n"}
