import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.rollout.engine_settings import CPU_MODE
from harness.runtime.cpu_standins import STANDINS
from harness.tools import environments

SCRIPT = environments.REPOSITORY / "harness" / "tools" / "environments.py"
QUICKSTART = environments.REPOSITORY / "launch" / "quickstart.py"
NO_GPU = {"PATH": "/usr/bin:/bin"}
NO_INDEX = {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_FIND_LINKS": ""}


def command(*arguments: str, script: Path = SCRIPT, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **NO_GPU, **environment}
    return subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, env=env, timeout=300
    )


@pytest.fixture
def small_pins(tmp_path: Path) -> Path:
    """The folder of a checkout whose pins are two small packages: the real ones take minutes on a slow line."""
    if os.environ.get("HARNESS_VENV") == "none":
        pytest.skip("HARNESS_VENV=none: no package registry is expected here")
    folder = tmp_path / "checkout"
    pins = folder / "configs" / "environments"
    pins.mkdir(parents=True)
    uv = f"uv=={environments.pins_of(environments.PINS / 'cpu.txt')['uv']}\n"
    (pins / "cpu.txt").write_text(uv)  # every environment gets this uv
    (pins / "small.txt").write_text(f"# About 0.1 GB on disk.\nsniffio==1.3.1\n{uv}")
    (pins / "tests.txt").write_text("# About 0.1 GB on disk.\niniconfig==2.3.1\n")
    (folder / "harness" / "tools").mkdir(parents=True)
    shutil.copy(SCRIPT, folder / "harness" / "tools")
    return folder


def make(checkout: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = checkout / "harness" / "tools" / "environments.py"
    return command(*arguments, script=script, HARNESS_ENVIRONMENT="small", HARNESS_VENV=str(folder))


def has(folder: Path, package: str) -> bool:
    python = str(folder / "bin" / "python")
    return subprocess.run([python, "-c", f"import {package}"], capture_output=True, cwd="/").returncode == 0


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        ((), environments.DEFAULT_WITH_GPU, "leave out HARNESS_ENVIRONMENT"),  # there is no GPU
        (("nope.toml",), "cpu", "error: nope.toml is not a file"),
        ((), "cuda-torch1.0", "environment = 'cuda-torch1.0' must be one of cpu, cuda-torch2.11"),
    ],
)
def test_what_is_asked_wrongly_is_found_before_anything_is_installed(
    words: tuple[str, ...], environment: str, said: str, tmp_path: Path
) -> None:
    run = command(*words, script=QUICKSTART, HARNESS_ENVIRONMENT=environment, HARNESS_VENV=str(tmp_path / "venv"))
    assert run.returncode == 2 and said in run.stderr, run.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.long
def test_made_completed_kept_brought_up_to_date_and_repaired(small_pins: Path, tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    run = make(small_pins, folder)
    assert (run.returncode, run.stdout) == (0, f"{folder}/bin/python\n"), run.stderr
    assert run.stderr.index("2 packages, about 0.1 GB on disk") < run.stderr.index("ready in")
    assert has(folder, "sniffio") and not has(folder, "iniconfig")

    (folder / "notes.txt").write_text("mine")
    run = make(small_pins, folder, "--tests")
    assert "installing tests.txt" in run.stderr and has(folder, "iniconfig")

    for arguments in ([], ["--tests"]):
        run = make(small_pins, folder, *arguments)
        assert (run.returncode, run.stderr) == (0, ""), "there is nothing to do"

    pins = small_pins / "configs" / "environments" / "small.txt"
    pins.write_text(pins.read_text().replace("sniffio==1.3.1", "sniffio==1.3.0"))
    run = make(small_pins, folder)
    assert "installing small.txt" in run.stderr and list(folder.glob("lib/*/site-packages/sniffio-1.3.0.dist-info"))
    assert (folder / "notes.txt").read_text() == "mine" and has(folder, "iniconfig"), "nothing of the user's is deleted"

    # What a process leaves that is killed while uv installs: half a package, and no stamp.
    (folder / "harness.json").unlink()
    [module] = folder.glob("lib/*/site-packages/sniffio/__init__.py")
    module.unlink()  # it is a link into uv's cache, which must stay whole
    module.write_text("raise ImportError('half')")
    assert not has(folder, "sniffio")
    run = make(small_pins, folder)
    assert run.returncode == 0 and has(folder, "sniffio"), run.stderr


@pytest.mark.long
def test_a_second_process_waits_for_the_first(small_pins: Path, tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    folder.mkdir()
    with open(folder / "harness.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = subprocess.Popen(
            [sys.executable, small_pins / "harness" / "tools" / "environments.py"],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HARNESS_ENVIRONMENT": "small", "HARNESS_VENV": str(folder)},
        )
        assert waiting.stderr and "waiting: another process is installing" in waiting.stderr.readline()
        assert not (folder / "bin").exists()
    waiting.communicate(timeout=120)
    assert waiting.returncode == 0 and has(folder, "sniffio")


def made_folder(folder: Path, base: str, files: tuple[str, ...] = ("cpu.txt",)) -> Path:
    """A folder that looks like a complete environment of this repository's pins, with a Python at `base`."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(base)
    (folder / "harness.lock").touch()
    (folder / "harness.json").write_text(json.dumps({"files": digests(*files)}))
    return folder


def digests(*files: str) -> dict[str, str]:
    return {name: environments._digest(environments.PINS / name) for name in files}


def test_an_environment_of_another_python_is_used_as_it_is(tmp_path: Path) -> None:
    folder = made_folder(tmp_path / "venv", sys.executable)  # its packages are those of a Python 3.99
    (folder / "notes.txt").write_text("mine")
    run = command(HARNESS_VENV=str(folder))
    assert (run.returncode, run.stdout, run.stderr) == (0, f"{folder}/bin/python\n", "")
    assert (folder / "notes.txt").read_text() == "mine"


def starts(folder: Path, **given: str) -> tuple[dict[str, str], list[str]]:
    """What Python finds when it starts in an environment: the variables of the CPU mode, and sys.path."""
    program = "import json, os, sys; print(json.dumps([dict(os.environ), sys.path]))"
    own = {name: value for name, value in os.environ.items() if name not in (*CPU_MODE, "PYTHONPATH")}
    done = subprocess.run(
        [folder / "bin" / "python", "-c", program], capture_output=True, text=True, env=own | given, check=True
    )
    assert done.stderr == ""
    found, path = json.loads(done.stdout)
    return {name: found[name] for name in CPU_MODE if name in found}, path


def test_an_environment_for_the_cpu_starts_in_cpu_mode_whatever_it_runs(tmp_path: Path) -> None:
    folder, other = tmp_path / "venv", str(tmp_path / "other")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    for name, content in (("harness.lock", ""), ("harness.json", json.dumps({"files": digests("cpu.txt")}))):
        (folder / name).write_text(content)  # as an older checkout has made it
    assert starts(folder)[0] == {}
    assert command(HARNESS_VENV=str(folder)).stderr == ""
    variables, path = starts(folder)
    assert variables == CPU_MODE and path.count(str(STANDINS)) == 1
    [packages] = map(str, folder.glob("lib/python3*/site-packages"))
    assert path.index(str(STANDINS)) == path.index(packages) - 1, "before the package that a stand-in hides"
    assert starts(folder, PYTHONPATH=other)[1].index(other) == 1, "another checkout's come first"
    assert starts(folder, OMP_NUM_THREADS="4")[0] == CPU_MODE | {"OMP_NUM_THREADS": "4"}
    assert starts(folder, SGLANG_USE_CPU_ENGINE="0")[0] == {"SGLANG_USE_CPU_ENGINE": "0"}

    [file] = folder.glob("lib/python3*/site-packages/*.pth")
    file.write_text(file.read_text().replace(str(environments.REPOSITORY), other))
    assert starts(folder)[0] == {}, "a checkout that has been moved away"
    assert command(HARNESS_VENV=str(folder)).stderr == "" and starts(folder)[0] == CPU_MODE


def test_an_environment_for_a_gpu_starts_as_it_is(tmp_path: Path) -> None:
    folder = made_folder(tmp_path / "venv", sys.executable, ("cuda-torch2.11.txt",))
    packages = folder / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    assert command(HARNESS_VENV=str(folder)).returncode == 0 and not list(packages.iterdir())


def test_an_environment_whose_python_is_gone_is_refused_and_kept(tmp_path: Path) -> None:
    folder = made_folder(tmp_path / "venv", "/opt/gone/python3.99")
    (folder / "notes.txt").write_text("mine")
    run = command(HARNESS_VENV=str(folder), **NO_INDEX)
    assert run.returncode == 2 and "was made with /opt/gone/python3.99, which is gone: move the folder" in run.stderr
    assert (folder / "notes.txt").read_text() == "mine"


def test_one_environment_is_not_installed_over_another(tmp_path: Path) -> None:
    folder = made_folder(tmp_path / "venv", sys.executable)
    run = command(HARNESS_ENVIRONMENT=environments.DEFAULT_WITH_GPU, HARNESS_VENV=str(folder))
    assert run.returncode == 2 and "holds the environment cpu, not cuda" in run.stderr


@pytest.mark.long
def test_without_network_one_sentence_and_125(tmp_path: Path) -> None:
    # pip's own configuration is put aside, so that no other source answers.
    run = command(HARNESS_VENV=str(tmp_path / "venv"), **NO_INDEX)
    assert run.returncode == 125, run.stderr
    assert run.stderr.splitlines()[-1].endswith("no package registry could be reached")
    assert not (tmp_path / "venv" / "harness.json").exists()


@pytest.mark.parametrize("script", ["quickstart.py", "run_tests.py", "ppo.py", "bisect_versions.py"])
def test_an_old_python_is_refused(script: str) -> None:
    path = str(QUICKSTART.with_name(script))
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(QUICKSTART.parent)!r}); sys.version_info = (3, 10, 13);"
        f"runpy.run_path({path!r}, run_name='__main__')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr == f"error: {path} needs Python 3.11 or newer, and this is 3.10.13.\n"


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    run = command(HARNESS_VENV=str(tmp_path))
    assert run.returncode == 2
    assert "was not made by this script" in run.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(("script", "start"), [(SCRIPT, "environment"), (QUICKSTART, "error")])
def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, script: Path, start: str) -> None:
    (tmp_path / "file").touch()
    for folder in ("/proc/x", str(tmp_path / "file"), str(tmp_path / "file" / "venv"), f"/{300 * 'x'}"):
        run = command(script=script, HARNESS_VENV=folder)
        assert run.returncode == 2 and run.stderr.count("\n") == 1, run.stderr
        assert run.stderr.startswith(f"{start}: HARNESS_VENV = {folder} cannot be written"), run.stderr


def test_a_folder_that_nobody_named_is_not_called_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".venv").touch()
    monkeypatch.setattr(environments, "REPOSITORY", tmp_path)
    monkeypatch.delenv("HARNESS_VENV", raising=False)
    with pytest.raises(
        environments.Unusable, match=r"^.*/\.venv, the environment's folder, cannot be written: Not a dir"
    ):
        environments.ensure()


def test_none_is_the_running_interpreter() -> None:
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
    files = list(environments.PINS.glob("*.txt"))
    assert files
    for file in files:
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert lines and all("==" in line and " @ " not in line for line in lines), file.name
        assert re.fullmatch(rf"{len(lines)} packages, about .+ on disk", environments.describe([file])), file.name
        if file.stem != "tests":
            needed = {"uv", "torch", "sglang", "setuptools", "rich", "jinja2", "matplotlib", "py-spy"}
            assert needed <= environments.pins_of(file).keys(), file.name
