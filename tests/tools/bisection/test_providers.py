"""Which environments are asked of uv, without asking it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from harness.tools.bisection import installation
from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.installation import Overlay, Pinned, Prepared, Unavailable, provider_of
from harness.tools.bisection.question import Options, Question, WrongQuestion
from harness.tools.bisection.state import STATE, load_state

TIMES = {"0.5.20": "2026-09-18T00:00:00Z", "2.9.0+cpu": "2026-10-01T00:00:00Z"}


@pytest.fixture(autouse=True)
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {Version(name): Candidate(name=name, time=time) for name, time in TIMES.items()}
    monkeypatch.setattr(installation, "releases", lambda package: found)
    monkeypatch.setattr(installation, "index_arguments", list)


def provider(folder: Path, script: str = "true", **options: object) -> installation.Provider:
    asked = Options(**options)  # type: ignore[arg-type]
    return provider_of(Question(options=asked, command=(script,), folder="/"), folder, True)


def test_what_is_held_is_in_every_environment(tmp_path: Path) -> None:
    made = provider(tmp_path, "launch/ppo.py", package="transformers", hold=("sglang==0.5.20",))
    assert isinstance(made, Pinned) and made.requirements[0] == "sglang==0.5.20" and made.cpu_mode
    assert made.held_since == TIMES["0.5.20"] and made.dated
    made = provider(tmp_path, package="transformers", python=sys.executable)
    assert isinstance(made, Pinned) and not made.requirements and not made.cpu_mode and made.python == sys.executable
    made = provider(tmp_path, package="transformers", hold=("sglang==0.5.20",))
    assert isinstance(made, Pinned) and made.requirements == ("sglang==0.5.20",) and made.cpu_mode


@pytest.mark.parametrize("asked", ["torch==2.9.0", "torch==2.9", "torch === 2.9.0+cpu", "torch==2.9.0+cu128,>=2"])
def test_any_build_tells_when_what_is_held_was_published(tmp_path: Path, asked: str) -> None:
    made = provider(tmp_path, package="transformers", hold=(asked,))
    assert isinstance(made, Pinned) and made.held_since == TIMES["2.9.0+cpu"]
    made = provider(tmp_path, package="transformers", hold=("torch>=2", "torch!=2.9.0"))
    assert isinstance(made, Pinned) and made.held_since == ""


def test_each_source_has_its_provider(tmp_path: Path) -> None:
    assert isinstance(provider(tmp_path, package="moving", only_package=True), Overlay)
    made = provider(tmp_path, package="moving", environments=str(tmp_path))
    assert isinstance(made, Prepared)
    (tmp_path / "1.0").mkdir()
    with pytest.raises(Unavailable, match="neither an environment"):
        made.make(Candidate(name="1.0", folder=str(tmp_path / "1.0")))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"hold": ("sglang==9.9",)}, "there is no such release"),
        ({"hold": ("==",)}, "--hold must be requirements"),
        (
            {"hold": ("sglang @ file:///x/sglang-1.0-py3-none-any.whl",)},
            "--hold cannot be an address, got sglang @ file",
        ),
        ({"hold": ("torch==2.9.*",)}, r"--hold needs NAME==VERSION, such as sglang==0.5.23, got torch==2.9.\*."),
        ({"hold": ("torch===x",)}, "--hold needs NAME==VERSION, such as sglang==0.5.23, got torch===x."),
        ({"python": "3.99"}, "--python must be an interpreter of this machine"),
        ({"python": "/no/python"}, "--python must be an interpreter of this machine"),
    ],
)
def test_what_cannot_be_provided(tmp_path: Path, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(WrongQuestion, match=sentence):
        provider(tmp_path, package="transformers", **options)


def test_pins_as_of_the_release_without_what_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def uv(words: list[str], stdin: str = "") -> str:
        asked.append((words, stdin))
        return "nvidia-cublas==13.0\nsglang==0.5.12\ntorch==2.8.0\n"

    monkeypatch.setattr(installation, "_ask_uv", uv)
    monkeypatch.setattr(installation, "_cpu_torch", lambda pin, *sources: [f"{pin}+cpu"])
    made = Pinned(
        store=tmp_path,
        package="sglang",
        requirements=("accelerate",),
        held_since="",
        dated=True,
        cpu_mode=True,
        keeps_python=False,
        sources=[],
        locks=tmp_path / "resolutions",
    )
    candidate = Candidate(name="0.5.12", time="2025-09-12T00:00:00Z", requires_python=">=3.8")
    lock = tmp_path / "resolutions" / "0.5.12.txt"
    made._resolve(candidate, lock)
    [(words, stdin)] = asked
    assert words[words.index("--exclude-newer") + 1] == "2025-09-17T00:00:00Z"
    assert stdin == "sglang==0.5.12\naccelerate"
    assert "sgl-kernel" in Path(words[words.index("--excludes") + 1]).read_text().split()
    header = [f"# python {sys.executable}", "# packages published until 2025-09-17T00:00:00Z"]
    assert lock.read_text().splitlines() == [*header, "sglang==0.5.12", "torch==2.8.0"]

    def install(folder: Path, _: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)

    monkeypatch.setattr(made, "_install", install)
    python = made.make(candidate).python
    said = "import os; print(os.environ.get('SGLANG_USE_CPU_ENGINE'))"
    own = {name: value for name, value in os.environ.items() if name != "SGLANG_USE_CPU_ENGINE"}
    assert subprocess.run([python, "-c", said], env=own, capture_output=True, text=True).stdout == "1\n"
    assert not made.make(candidate).freeze, "the plugins' package is no pin: no registry has it"


def test_another_python_where_a_release_does_not_allow_this_one() -> None:
    assert installation.find_python(">=3.8").startswith("/")
    with pytest.raises(Unavailable):
        installation.find_python("<3.1")


def test_a_python_that_does_not_start_is_said(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport nothing_of_this_name\n")
    python.chmod(0o755)
    with pytest.raises(Unavailable, match="does not start: ModuleNotFoundError"):
        installation.Environment(python=str(python)).with_freeze()


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_state_that_others_could_have_written_is_not_run(tmp_path: Path, mode: int) -> None:
    (tmp_path / STATE).write_text("{}")
    tmp_path.chmod(mode)
    with pytest.raises(WrongQuestion, match="a folder of yours that nobody else can write to"):
        load_state(tmp_path)


@pytest.mark.parametrize("text", ["{", '{"records": []}', "\xff", "[" * 100_000])
def test_a_state_of_another_program_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / STATE).write_text(text)
    with pytest.raises(WrongQuestion, match="was cut off, or another version of this program wrote it"):
        load_state(tmp_path)


def test_what_uv_builds_does_not_see_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv gives its environment to build backends."""
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\nenv\n")
    uv.chmod(0o700)
    monkeypatch.setattr(installation, "uv_binary", lambda: str(uv))
    hidden = {
        "HF_TOKEN": "hf", "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "DB_PASS": "pass", "MYSQL_PWD": "pwd",
        "NOTE": "ghp_abcdefghijklmnopqrstuvwxyz", "DATABASE_URL": "postgresql://u:p@h/db",
    }  # fmt: skip
    kept = {
        "HTTPS_PROXY": "http://u:p@proxy.example:3128", "UV_INDEX_X_PASSWORD": "x", "PIP_INDEX_URL": "https://u:p@i.example",
        "HOME": str(tmp_path), "CC": "gcc", "MAX_JOBS": "2",
    }  # fmt: skip
    for name, value in (hidden | kept).items():
        monkeypatch.setenv(name, value)
    installation._install_by_uv(["pip", "install", "x"], tmp_path)
    for said in (installation._ask_uv(["pip", "compile"]), (tmp_path / "install.log").read_text()):
        seen = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
        assert not hidden.keys() & seen.keys() and kept.items() <= seen.items() and "PATH" in seen
