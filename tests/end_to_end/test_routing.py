"""The experts that tokens take in a real engine: recorded, saved, compared with the trainer's, and replayed."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.end_to_end.launching import QUICKSTART, SHARING_GPUS, run

WORDS = ["--algorithm.advantage", "grpo", "--run.steps", "2", "--actor.learning_rate", "1e-5"]


def change_an_expert(file: Path) -> None:
    """Let the engine have taken another expert, in the last layer, for every response."""
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        metadata = opened.metadata()
    routed = tensors["routed_experts"]
    last = routed[:, :, -1].long()
    free = torch.ones((*last.shape[:2], 8)).scatter_(2, last.clamp(min=0), 0.0)
    known = last[..., 0] >= 0
    routed[:, :, -1, 0] = torch.where(known, free.argmax(-1), last[..., 0]).int()
    save_file(tensors, file, metadata=metadata)


@pytest.mark.long
def test_on_a_cpu_engine_and_trainer_choose_the_same_experts_and_other_ones_are_replayed(tmp_path: Path) -> None:
    words = [QUICKSTART, "--model.name", "qwen3_moe", *WORDS]
    record = run(tmp_path / "record", 2, *words, "--rollout.routing", "record", "--rollout.save", f"{tmp_path}/saved")
    assert record.process.returncode == 0, record.output()
    for row in record.metrics():
        prefix = "" if row["kind"] == "step" else "final/"
        assert row[f"{prefix}routing/compared_share"] == 1
        assert row[f"{prefix}routing/token_share"] <= 0.05, "the same model in float32: only ties differ"
    for file in (tmp_path / "saved").glob("*.safetensors"):
        change_an_expert(file)
    replay = ["--rollout.routing", "replay", "--rollout.load", f"{tmp_path}/saved"]
    packed = [
        "--model.packed",
        "true",
        "--actor.gradient_checkpointing",
        "true",
        "--actor.tokens_per_microbatch",
        "600",
    ]
    job = run(tmp_path / "replay", 2, *words, *replay, *packed)
    assert job.process.returncode == 0, job.output()
    for row in job.metrics():
        assert row["routing/token_share"] == 1 and row["routing/layer_share"] >= 0.5
        assert row["routing/log_probs_moved_by_replay"] > 1e-4
        assert row["routing/log_prob_difference_before_replay"] < row["routing/log_prob_difference_after_replay"]
        assert row["log_prob_difference_mean"] == pytest.approx(row["routing/log_prob_difference_after_replay"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_on_a_gpu_a_replay_brings_the_trainer_nearer_to_the_engine(name: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, has {torch.cuda.device_count()}")
    words = ["configs/gpu/tiny.toml", "--model.name", name, "--rollout.routing", "replay"]
    job = run(tmp_path / "run", 2, *words, *SHARING_GPUS, seconds=500)
    assert job.process.returncode == 0, job.output()
    for row in job.metrics()[:3]:
        assert row["routing/compared_share"] == 1 and row["routing/token_share"] < 0.5, "bfloat16: near ties differ"
        before, after = (row[f"routing/log_prob_difference_{when}_replay"] for when in ("before", "after"))
        assert after <= before * 1.1
