"""harness.rollout.sglang_api on a real engine in SGLang's CPU mode: one engine for all tests of this file."""

import ast
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.rollout import sglang_api

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a real engine in CPU mode answered; the process group is ended whatever happens."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed")
    folder = tmp_path_factory.mktemp("engine")
    code = (
        "from pathlib import Path; from harness.runtime.cpu_standins import activate; activate();"
        "from harness.task.tiny_models import save_tiny_model;"
        f"[save_tiny_model('qwen2', Path({str(folder)!r}) / f'model-{{i}}', i, texts=['hello']) for i in range(2)]"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)
    script = Path(__file__).with_name("engine_on_cpu.py")
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=400)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err[-4000:]
    answer: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return answer


@pytest.mark.slow
def test_the_source_tells_the_truth_about_the_imported_package(real: dict[str, Any]) -> None:
    api = sglang_api.probe()
    assert real["arguments_as_read"] == real["arguments"]
    assert tuple(real["parameters"]["update_weights_from_tensor"]) == api.tensor_update_parameters
    assert tuple(real["parameters"]["update_weights_from_distributed"]) == api.distributed_update_parameters
    assert real["foretold"] and real["environment"] == real["foretold"]


@pytest.mark.slow
def test_every_way_of_updating_restores_every_tensor(real: dict[str, Any]) -> None:
    start = real["at start"]
    for differs in ("after tensors of another model", "after reset"):
        assert [name for name in start if real[differs][name] == start[name]] == [], differs
    for same in ("after bucket", "after reset and tensors", "after reset and disk"):
        assert real[same] == start, same


@pytest.mark.slow
def test_generation_and_refusals_of_a_real_engine(real: dict[str, Any]) -> None:
    assert [len(ids) for ids in real["output_ids"]] == [6, 6, 6]
    assert real["no_such_folder"]
    api = sglang_api.probe()
    assert (real["checksum"] is not None) == api.checksum_needs_cuda
    assert real["compare"]


def test_no_default_of_this_sglang_is_refused() -> None:
    """Of every argument whose default is a constant: types and choices are read rightly."""
    from harness.rollout.sglang_api.probe import argument_classes

    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed")
    api = sglang_api.probe()
    defaults = {
        node.target.id: node.value.value
        for each in argument_classes(api.tree)
        for node in each.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    assert len(defaults) > 100
    sglang_api.check_arguments(api, {name: defaults[name] for name in defaults if name in api.engine_arguments}, {})
