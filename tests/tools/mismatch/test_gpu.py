"""launch/mismatch.py on GPUs: what is changed there and not on a CPU, and the planted sources.

Every run ends by itself.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.launching import SHARING_GPUS, Job
from tests.tools.mismatch.sources import PLANTED, Planted
from tests.tools.mismatch.test_mismatch import check_answer, reached_file, search

pytestmark = pytest.mark.gpu

ONE_GPU = [
    "configs/gpu/tiny.toml",
    "--parallel.tp",
    "1",
    "--rollout.prompts_per_step",
    "4",
    "--actor.minibatch_size",
    "16",
]
SECONDS = 900
BELOW_ROUNDING = "router_in_bfloat16"
"""On H100s it moves the log-probs by no more than float16's rounding. That engine and trainer agree is a miss, and an
expected one."""
OF_TWO_RANKS = "double_all_reduce"
"""What is planted in a collective operation. The others have a GPU each."""


@pytest.fixture(autouse=True)
def one_gpu_for_each_worker(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let runs of one rank, which several workers of xdist start at a time, share the GPUs evenly."""
    planted = request.node.callspec.params.get("planted") if hasattr(request.node, "callspec") else None
    if torch.cuda.device_count() > 1 and not (planted and planted.name == OF_TWO_RANKS):
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(worker % torch.cuda.device_count()))


def sources_of(folder: Path, *words: str) -> dict[str, dict[str, Any]]:
    """Run launch/mismatch.py to its end; return the sources by name, the attention backends by what they become."""
    job = Job(folder, 1, [*ONE_GPU, *SHARING_GPUS, *words], script="launch/mismatch.py").start()
    assert job.wait(SECONDS) in (0, 1), job.output()[-4000:]
    file = folder / "mismatch.json"
    assert file.exists() and job.left_behind() == [], job.output()[-4000:]
    found = json.loads(file.read_text())["sources"]
    return {
        each["name"] + each["how"].partition("->")[2] * (each["name"] == "attention backend"): each for each in found
    }


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_deterministic_inference_and_attention_are_changed(model: str, tmp_path: Path) -> None:
    found = sources_of(tmp_path / "run", "--model.name", model)
    assert found["deterministic inference"]["after"], found["deterministic inference"]["why_not"]
    others = [each for name, each in found.items() if name.startswith("attention backend")]
    assert any(each["after"] for each in others), others
    if model == "qwen3":
        assert found["rl_on_policy_target"]["after"], found["rl_on_policy_target"]["why_not"]


def test_graphs_that_are_on_by_the_preset_are_turned_off(tmp_path: Path) -> None:
    found = sources_of(tmp_path / "run", "--engine.preset", "sglang")
    for name in ("CUDA graphs", "engine preset", "deterministic inference"):
        assert found[name]["after"], found[name]["why_not"]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda each: each.name)
def test_a_planted_source_is_named_on_gpus(planted: Planted, tmp_path: Path) -> None:
    ranks = 2 if planted.name == OF_TWO_RANKS else 1
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, has {torch.cuda.device_count()}")
    # Not float32, as on a CPU: SGLang 0.5.17 compiles its norms for half precision alone.
    words = ("--parallel.tp", str(ranks), "--model.dtype", "float16", *SHARING_GPUS)
    code, answer, job = search(
        tmp_path / "run", planted, *words, config="configs/gpu/tiny.toml", ranks=ranks, seconds=580
    )
    lines = job.output().splitlines()
    sentence = answer.get("sentence") or next((line for line in reversed(lines) if "SOURCE:" in line), lines[-1])
    note = "" if reached_file(job).exists() else "(never ran) "
    # Also of a miss; pytest -s shows it.
    print(f"\n| {planted.name} | {planted.source} | {note}{sentence} |")
    if planted.name == BELOW_ROUNDING and answer.get("agrees") and reached_file(job).exists():
        pytest.xfail(sentence)
    check_answer(planted, code, answer, job)
