"""PPO with an engine in block-FP8: model.rollout_precision = "fp8_block"."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.end_to_end.launching import SHARING_GPUS, Job, run
from tests.weights.fp8_on_two_ranks import OVERRIDES_ON_GPU

CONFIG = "configs/cpu/fp8_block.toml"


def words(model: str) -> list[str]:
    sizes = OVERRIDES_ON_GPU[model].items()
    overrides = [word for name, value in sizes for word in (f"--model.overrides.{name}", str(value))]
    precision = ["--model.dtype", "bfloat16", "--model.rollout_precision", "fp8_block"]
    return ["--model.name", model, *precision, *overrides, "--run.steps", "2"]


def check(job: Job) -> str:
    """The run passed, and says of the precision what it costs. Return the verdict."""
    assert job.process.returncode == 0, job.output()[-6000:]
    verdict = next(line for line in job.output().splitlines() if "PASSED" in line)
    assert "onto poison" in verdict and "one of changed weights before them" in verdict
    assert "the fp8_block engine and the bfloat16 trainer differ by up to" in verdict
    assert "on its own first load" in verdict and "NOT compared" not in verdict
    assert job.left_behind() == []
    return verdict


@pytest.mark.long
def test_ppo_with_an_fp8_engine_saves_what_is_not_quantized_and_resumes(tmp_path: Path) -> None:
    every = ["--checkpoint.folder", str(tmp_path / "saved"), "--checkpoint.every", "1"]
    job = run(tmp_path / "first", 2, CONFIG, "--run.steps", "1", *every)
    verdict = check(job)
    assert "all 41 tensors in the engine equal the trainer's by fingerprint" in verdict
    assert "the first left what SGLang itself loads" in verdict
    folder = job.folder / "model-fp8-host0"
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "fp8" and config["weight_block_size"] == [128, 128]
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.get_tensor("model.layers.0.mlp.up_proj.weight").dtype == torch.float8_e4m3fn
        assert file.get_tensor("model.layers.0.mlp.up_proj.weight_scale_inv").shape == (2, 2)
    assert "the fp8_block engine" in (job.folder / "report.md").read_text()
    saved = tmp_path / "saved" / "step-1"
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    with safe_open(saved / "model.safetensors", "pt") as file:
        assert {str(file.get_tensor(name).dtype) for name in set(file.keys())} == {"torch.bfloat16"}
    resumed = run(tmp_path / "second", 2, CONFIG, "--run.steps", "2", *every, "--checkpoint.resume", "latest")
    check(resumed)
    assert [step["step"] for step in resumed.metrics() if "seconds" in step] == [1]


@pytest.mark.long
def test_the_sync_job_reads_back_what_it_sends(tmp_path: Path) -> None:
    every = ["bucket", "tensor", "pull", "disk"]
    job = run(tmp_path / "run", 2, CONFIG, "--syncs", "2", "--transports", *every, script="launch/sync.py")
    assert job.process.returncode == 0, job.output()[-6000:]
    for name in every:
        assert f"tensors by {name}, every tensor changed before each, every element read back and equal" in job.output()
    assert "NOT compared" not in job.output()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "mesh", "more"),
    [
        ("qwen2", (1, 2), []),
        ("qwen3_moe", (1, 2), ["--engine.args.ep_size", "2"]),
        ("qwen3_moe", (2, 1), ["--weights.transport", "pull"]),
        ("deepseek_v3", (1, 2), []),
        ("deepseek_v3", (1, 2), ["--weights.transport", "pull"]),
        ("deepseek_v3", (2, 1), ["--weights.transport", "disk"]),
    ],
)
def test_gpu_engines_in_fp8(model: str, mesh: tuple[int, int], more: list[str], tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, has {torch.cuda.device_count()}")
    parallel = ["--parallel.dp", str(mesh[0]), "--parallel.tp", str(mesh[1])]
    deterministic = ["--engine.args.enable_deterministic_inference", "true"]
    arguments = [*words(model), *parallel, *more, *deterministic, *SHARING_GPUS]
    check(run(tmp_path / "run", 2, "configs/gpu/tiny.toml", *arguments, seconds=600))
