"""PPO with a draft model: a DeepSeek-V3 with a layer for multi-token prediction (MTP), served with EAGLE."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from harness.task.tiny_models import save_tiny_model
from harness.tools.repro.predictable_drafts import ENGINE_ARGUMENTS, ONE_LAYER, make_predictable
from tests.end_to_end.launching import DP_AND_EP, QUICKSTART, SHARING_GPUS, Job, run
from tests.weights.fp8_on_two_ranks import OVERRIDES

DRAFTS = [word for name, value in ENGINE_ARGUMENTS.items() for word in (f"--engine.args.{name}", str(value))]
SLOWLY = ["--actor.learning_rate", "1e-5"]
"""Of more the model becomes another one, which the draft does not guess."""
TEXTS = [f"{left} + {right} =" for left in range(10) for right in range(10)]


def predictable(folder: Path, on_gpu: bool = False) -> Path:
    """A model whose MTP layer guesses almost every token."""
    if on_gpu:
        save_tiny_model("deepseek_v3", folder, 0, "bfloat16", "cuda", ONE_LAYER, texts=TEXTS)
    else:
        save_tiny_model("deepseek_v3", folder, 0, "float32", "cpu", ONE_LAYER, texts=TEXTS)
    make_predictable(folder)
    return folder


def accept_lengths(job: Job) -> list[float]:
    return [row["speculation/accept_length"] for row in job.metrics() if "speculation/accept_length" in row]


@pytest.mark.long
def test_target_and_draft_are_kept_in_step(tmp_path: Path) -> None:
    model = predictable(tmp_path / "model")
    more = ["--checkpoint.every", "2", "--checkpoint.folder", str(tmp_path / "checkpoints")]
    job = run(tmp_path / "run", 2, QUICKSTART, "--model.name", str(model), "--run.steps", "2", *DRAFTS, *more, *SLOWLY)
    assert job.process.returncode == 0, job.output()[-6000:]
    verdict = next(line for line in job.output().splitlines() if "PASSED" in line)
    assert (
        "all 95 tensors in the engine equal the trainer's by fingerprint" in verdict and "NOT compared" not in verdict
    )
    assert "6 tensors that the engine derives are up to date" in verdict, "w_kc and w_vc of two layers and the draft's"
    assert min(accept_lengths(job)) > 1.4 and "accept length 1." in job.output()
    assert job.left_behind() == []
    with (
        safe_open(model / "model.safetensors", "pt") as before,
        safe_open(tmp_path / "checkpoints" / "step-2" / "model.safetensors", "pt") as after,
    ):
        for name in ("model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.7.up_proj.weight"):
            assert torch.equal(before.get_tensor(name), after.get_tensor(name)), "nothing trains the MTP layer"
        trained = "model.layers.1.self_attn.o_proj.weight"
        assert not torch.equal(before.get_tensor(trained), after.get_tensor(trained))


@pytest.mark.long
def test_a_pull_with_what_deepseek_is_served_with_reaches_the_draft(tmp_path: Path) -> None:
    """The draft model, DP attention, experts in parallel and block FP8 at once."""
    words = ["--model.name", "deepseek_v3", "--model.overrides.num_nextn_predict_layers", "1", *DRAFTS, *DP_AND_EP]
    words += ["--model.dtype", "bfloat16", "--model.rollout_precision", "fp8_block", "--weights.transport", "pull"]
    words += [f"--model.overrides.{name}={value}" for name, value in OVERRIDES["deepseek_v3"].items()]
    job = run(tmp_path / "run", 2, QUICKSTART, *words, seconds=580)
    assert job.process.returncode == 0, job.output()[-6000:]
    assert "the first left what SGLang itself loads" in job.output() and len(accept_lengths(job)) >= 2


@pytest.mark.gpu
def test_target_and_draft_are_kept_in_step_on_a_gpu(tmp_path: Path) -> None:
    model = predictable(tmp_path / "model", on_gpu=True)
    words = ["configs/gpu/tiny.toml", "--model.name", str(model), "--parallel.tp", "1", "--run.steps", "2"]
    job = run(
        tmp_path / "run", 1, *words, *SLOWLY, *DRAFTS, *SHARING_GPUS, "--weights.transport", "bucket", seconds=300
    )
    assert job.process.returncode == 0, job.output()[-6000:]
    assert "tensors in the engine equal the trainer's by fingerprint" in job.output()
    assert min(accept_lengths(job)) > 1.2
    assert job.left_behind() == []
