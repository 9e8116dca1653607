"""The fault programs: each starts one engine on two ranks, and runs all its cases on it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.launching import run

LONG = {"deepseek_v3", "llama", "qwen3_moe"}
"""Programs that only -m long runs: each takes a minute or more."""

Seen = dict[str, Any]


@pytest.hookimpl(tryfirst=True)  # before tests are left out by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks long what needs a long program, by a fixture or by its parameter."""
    for item in items:
        needs = {*getattr(item, "fixturenames", ())}
        if callspec := getattr(item, "callspec", None):
            needs.add(callspec.params.get("program"))
        if needs & LONG and item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.long)


def run_program(name: str, folder: Path) -> Seen:
    """What tests/weights/faults_<name>.py saw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        job = run(folder, 2, name, script="tests/weights/faults_program.py")
    assert job.process.returncode == 0, job.output()[-6000:]
    assert job.left_behind() == []
    seen: Seen = json.loads((folder / "seen.json").read_text())
    return seen


@pytest.fixture(scope="session")
def deepseek_v3(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return run_program("deepseek_v3", tmp_path_factory.mktemp("deepseek_v3"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return run_program("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return run_program("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))
