"""The main job on GPUs: real kernels, CUDA IPC, the memory saver. Run where there are two GPUs, or four."""

from pathlib import Path

import pytest
import torch

from tests.end_to_end.launching import run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_three_steps_with_the_memory_saver(tmp_path: Path, name: str, dp: int, tp: int) -> None:
    if torch.cuda.device_count() < dp * tp:
        pytest.skip(f"needs {dp * tp} GPUs, has {torch.cuda.device_count()}")
    mesh = ["--parallel.dp", str(dp), "--parallel.tp", str(tp)]
    job = run(tmp_path / "run", dp * tp, "configs/gpu/tiny.toml", "--model.name", name, *mesh, seconds=300)
    assert job.process.returncode == 0, job.output()
    steps = job.metrics()
    assert all(step["log_prob_difference_mean"] < 5e-2 for step in steps[:3])
    slept = [event for event in job.events() if event["event"] == "phase_end" and event["phase"] == "release"]
    woken = [event for event in job.events() if event["event"] == "phase_end" and event["phase"] == "resume_kv_cache"]
    assert all(
        after["memory"]["free"] > before["memory"]["free"] + (1 << 30)
        for before, after in zip(woken, slept, strict=True)
    ), "sleep must give memory back"
    assert job.left_behind() == []
