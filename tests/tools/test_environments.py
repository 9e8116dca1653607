import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.tools import environments

SCRIPT = environments.REPOSITORY / "harness" / "tools" / "environments.py"
BASE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": "/usr/bin:/bin", **environment}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, env=env, timeout=300
    )


@pytest.fixture
def small_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pinned files of two small packages, in place of the real ones, which take minutes on a slow line."""
    if os.environ.get("HARNESS_VENV") == "none":
        pytest.skip("HARNESS_VENV=none: no package registry is expected here")
    pins = tmp_path / "pins"
    pins.mkdir()
    pinned = environments.Wanted(BASE, (environments.PINS / "cpu.txt",))
    needed = f"{pinned.pin('uv')}\n{pinned.pin('setuptools')}\n"
    (pins / "small.txt").write_text(f"# About 0.1 GB on disk.\nsniffio==1.3.1\n{needed}")
    (pins / "tests.txt").write_text("# About 0.1 GB on disk.\niniconfig==2.3.1\n")
    monkeypatch.setattr(environments, "PINS", pins)
    return pins


def has(python: Path, package: str) -> bool:
    return subprocess.run([str(python), "-c", f"import {package}"], capture_output=True, cwd="/").returncode == 0


@pytest.mark.long
def test_made_completed_kept_and_made_anew(small_pins: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "venv"
    python = environments.ensure("small", folder=folder)
    said = capfd.readouterr().err
    assert said.index("3 packages, about 0.1 GB on disk") < said.index("ready in")
    assert has(python, "sniffio") and not has(python, "iniconfig")
    assert has(python, "harness"), "the checkout is installed"

    (folder / "left-here").touch()
    assert environments.ensure("small", tests=True, folder=folder) == python
    assert "completing" in capfd.readouterr().err
    assert has(python, "iniconfig") and (folder / "left-here").exists()

    started = time.monotonic()
    environments.ensure("small", folder=folder)
    environments.ensure("small", tests=True, folder=folder)
    assert time.monotonic() - started < 0.1
    assert capfd.readouterr().err == ""

    (small_pins / "small.txt").write_text(
        (small_pins / "small.txt").read_text().replace("sniffio==1.3.1", "sniffio==1.3.0")
    )
    environments.ensure("small", folder=folder)
    assert "starting over" in capfd.readouterr().err
    assert not (folder / "left-here").exists() and not has(python, "iniconfig")
    assert has(python, "sniffio")


@pytest.mark.long
def test_a_killed_install_is_repaired_and_a_second_process_waits(small_pins: Path, tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    code = (
        "import sys; from pathlib import Path; from harness.tools import environments;"
        f"environments.PINS = Path({str(small_pins)!r}); environments.ensure('small', folder=Path({str(folder)!r}))"
    )

    def start() -> subprocess.Popen[str]:
        arguments = [sys.executable, "-c", code]
        return subprocess.Popen(
            arguments, stderr=subprocess.PIPE, text=True, cwd=environments.REPOSITORY, start_new_session=True
        )

    first = start()
    deadline = time.monotonic() + 60
    while not (folder / "bin" / "python").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert not (folder / "harness.json").exists()

    second = start()
    time.sleep(1.0)
    third = start()
    said = [process.communicate(timeout=120)[1] for process in (second, third)]
    assert [second.returncode, third.returncode] == [0, 0], said
    assert "starting over" in said[0] and "ready in" in said[0]
    assert "waiting: another process" in said[1] and "making" not in said[1]
    assert json.loads((folder / "harness.json").read_text())["files"].keys() == {"small.txt"}
    assert has(folder / "bin" / "python", "sniffio")


def test_without_network_one_sentence_and_125(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9/simple"
    # pip's own configuration is put aside, so that no other source answers.
    run = command(
        HARNESS_VENV=str(tmp_path / "venv"), PIP_CONFIG_FILE="/dev/null", PIP_INDEX_URL=nowhere, PIP_FIND_LINKS=""
    )
    assert run.returncode == 125, run.stderr
    assert run.stderr.splitlines()[-1].endswith("no package registry could be reached")
    assert not (tmp_path / "venv" / "harness.json").exists()


def test_an_old_python_is_refused() -> None:
    code = (
        "import runpy, sys; sys.version_info = (3, 10, 13); sys.argv = ['x'];"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr == (
        "environment: python = 3.10.13 is too old: run this with Python 3.11 or newer, such as python3.11\n"
    )


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    run = command(HARNESS_VENV=str(tmp_path))
    assert run.returncode == 2
    assert "was not made by the harness" in run.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_unknown_environment_is_refused() -> None:
    run = command("--environment", "cuda-torch1.0", HARNESS_VENV="")
    assert run.returncode == 2
    assert "environment = 'cuda-torch1.0' must be one of cpu, cuda-torch2.11" in run.stderr


def test_none_is_the_running_interpreter(tmp_path: Path) -> None:
    run = command(HARNESS_VENV="none")
    assert (run.returncode, run.stdout) == (0, f"{sys.executable}\n"), run.stderr


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ("", []),
        ("global.timeout='60'", []),
        ("global.index-url='https://a/simple'", ["--index-url", "https://a/simple"]),
        ("global.index-url='https://a'\n:env:.index-url='https://b'", ["--index-url", "https://b"]),
        (
            "global.extra-index-url='https://a\\nhttps://b'",
            ["--extra-index-url", "https://a", "--extra-index-url", "https://b"],
        ),
        ("install.find-links='https://a/links /no/such/folder'", ["--find-links", "https://a/links"]),
        ("global.no-index='true'\nglobal.find-links='/usr'", ["--no-index", "--find-links", "/usr"]),
    ],
)
def test_pip_sources_become_uv_sources(config: str, arguments: list[str]) -> None:
    strategy = ["--index-strategy", "unsafe-best-match"] if arguments else []
    assert environments.uv_sources(config) == arguments + strategy


def test_every_pinned_file_pins_everything() -> None:
    for file in environments.PINS.glob("*.txt"):
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert lines and all("==" in line and " @ " not in line for line in lines), file.name
        wanted = environments.Wanted(BASE, (file,))
        assert re.fullmatch(rf"{len(lines)} packages, about .+ on disk", wanted.describe()), file.name
        if file.stem != "tests":
            assert all(
                wanted.pin(package) for package in ("uv", "torch", "sglang", "setuptools", "rich", "jinja2", "py-spy")
            )
