"""launch/mismatch.py on GPUs: what is changed there and not on a CPU, and the planted sources. Every run ends by itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.launching import SHARING_GPUS, Job
from tests.tools.mismatch.chosen_by_another import CHOSEN
from tests.tools.mismatch.sources import PLANTED, Planted
from tests.tools.mismatch.test_mismatch import check, name_of

pytestmark = pytest.mark.gpu

ONE_GPU = ["configs/gpu/tiny.toml", "--parallel.tp", "1", "--rollout.prompts_per_step", "4"]
SECONDS = 900


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


@pytest.mark.parametrize("model", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_deterministic_inference_and_attention_are_changed(model: str, tmp_path: Path) -> None:
    found = sources_of(tmp_path / "run", "--model.name", model)
    assert found["deterministic inference"]["after"], found["deterministic inference"]["why_not"]
    others = [each for name, each in found.items() if name.startswith("attention backend")]
    assert any(each["after"] for each in others), others
    if model == "qwen2":
        assert found["rl_on_policy_target"]["after"], found["rl_on_policy_target"]["why_not"]


def test_graphs_that_are_on_by_the_preset_are_turned_off(tmp_path: Path) -> None:
    found = sources_of(tmp_path / "run", "--engine.preset", "sglang")
    for name in ("CUDA graphs", "engine preset", "deterministic inference"):
        assert found[name]["after"], found[name]["why_not"]


@pytest.mark.parametrize("planted", [*PLANTED, *CHOSEN], ids=name_of)
def test_a_planted_source_is_named_on_two_gpus(planted: Planted, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, has {torch.cuda.device_count()}")
    # Not float32, as on a CPU: SGLang 0.5.17 compiles its norms for half precision alone.
    check(planted, tmp_path / "run", "--model.dtype", "float16", *SHARING_GPUS, config="configs/gpu/tiny.toml")
