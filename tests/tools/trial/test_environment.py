"""Which environments are asked of uv, without asking it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from harness.config.mistakes import ConfigError
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.environments import REPOSITORY
from harness.tools.trial import environment
from harness.tools.trial.environment import Environment, Pinned, published
from harness.tools.trial.indexes import Candidate

TIMES = {"0.5.20": "2026-09-18T00:00:00Z", "2.9.0+cpu": "2026-10-01T00:00:00Z"}


@pytest.fixture(autouse=True)
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {Version(name): Candidate(name=name, time=time) for name, time in TIMES.items()}
    monkeypatch.setattr(environment, "releases", lambda package: found)


@pytest.mark.parametrize("asked", ["torch==2.9.0", "torch==2.9", "torch === 2.9.0+cpu", "torch==2.9.0+cu128,>=2"])
def test_any_build_tells_when_what_is_held_was_published(asked: str) -> None:
    assert published(asked) == TIMES["2.9.0+cpu"]
    assert published("torch>=2") == published("torch!=2.9.0") == ""


@pytest.mark.parametrize(
    ("hold", "sentence"),
    [
        ("sglang==9.9", "there is no such release"),
        ("==", "--hold must be requirements"),
        ("sglang @ file:///x/sglang-1.0-py3-none-any.whl", "--hold cannot be an address, got sglang @ file"),
        ("torch===x", "there is no such release"),
    ],
)
def test_what_cannot_be_held(hold: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        published(hold)


def test_pins_as_of_the_release_without_what_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def uv(words: list[str], log: Path) -> str:
        asked.append(words)
        if words[0] == "venv":
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", words[-1]], check=True)
        return "nvidia-cublas==13.0\nsglang==0.5.12\ntorch==2.8.0\n"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(environment, "_uv", uv)
    monkeypatch.setattr(
        environment, "_cpu_torch", lambda pin, *sources: ["--torch-backend", "cpu", "--no-deps", f"{pin}+cpu"]
    )
    locks = tmp_path / "resolutions"
    made = Pinned(package="sglang", requirements=("accelerate",), cpu_mode=True, sources=("--no-index",), locks=locks)
    candidate = Candidate(name="0.5.12", time="2025-09-12T00:00:00Z", requires_python=">=3.8")
    found = made.make(candidate)
    compiled, _, torch, rest = asked
    assert compiled[compiled.index("--exclude-newer") + 1] == "2025-09-17T00:00:00Z"
    assert (locks / "0.5.12.in").read_text().split() == ["sglang==0.5.12", "accelerate"]
    assert "sgl-kernel" in Path(compiled[compiled.index("--excludes") + 1]).read_text().split()
    assert (locks / "0.5.12.txt").read_text().splitlines()[2:] == ["sglang==0.5.12", "torch==2.8.0+cpu"]
    assert torch[-4:] == ["--no-index", "--torch-backend", "cpu", "torch==2.8.0+cpu"] and "--torch-backend" not in rest
    assert found.sources == ("--no-index", "--torch-backend", "cpu")
    said = "import os; print(os.environ.get('SGLANG_USE_CPU_ENGINE'))"
    own = {name: value for name, value in os.environ.items() if name != "SGLANG_USE_CPU_ENGINE"}
    assert subprocess.run([found.python, "-c", said], env=own, capture_output=True, text=True).stdout == "1\n"
    assert made.make(candidate) == found and len(asked) == 4, "it is kept"
    assert not found.freeze, "the plugins' package is no pin: no registry has it"


def test_another_python_where_a_release_does_not_allow_this_one() -> None:
    assert environment.find_python(">=3.8").startswith("/")
    with pytest.raises(UnsupportedEnvironment):
        environment.find_python("<3.1")


def test_a_python_that_does_not_start_is_said(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport nothing_of_this_name\n")
    python.chmod(0o755)
    with pytest.raises(UnsupportedEnvironment, match="does not start: ModuleNotFoundError"):
        Environment(python=str(python)).with_freeze()


def test_only_scripts_of_this_checkout_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    found = Environment(python="/opt/python", paths=("/site",))
    assert found.variables(cpu_mode=False)["PYTHONPATH"] == "/site:/mine"
    paths = found.variables(cpu_mode=False, imports_harness=True)["PYTHONPATH"].split(os.pathsep)
    assert paths == ["/site", "/mine", str(REPOSITORY)]


def test_a_build_gets_no_secrets_and_uv_its_indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv gives its environment to build backends."""
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\nenv\n")
    uv.chmod(0o700)
    monkeypatch.setattr(environment, "uv_binary", lambda: str(uv))
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
    said = environment._uv(["pip", "install", "x"], tmp_path / "install.log")
    seen = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    assert not hidden.keys() & seen.keys() and kept.items() <= seen.items() and "PATH" in seen
