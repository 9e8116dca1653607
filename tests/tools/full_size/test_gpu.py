"""A real step on one GPU or two, beside what executing it on fake tensors predicted: peaks of the trainer's memory by
phase."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.runtime import GIB
from tests.end_to_end.launching import run

pytestmark = pytest.mark.gpu

PREDICT = """
import json, sys
from pathlib import Path
from harness.runtime import cpu_standins
cpu_standins.activate()
from harness.tools.command_line import parse
from harness.tools.full_size import model_and_options, whole_run
from harness.tools.full_size.gpu_stages import BESIDE, EngineShare, GpuMemory, Shares
config = parse(sys.argv[2:]).config
folder = model_and_options._of_config(config, model_and_options.Options(), Path(sys.argv[1])).folder
peaks = whole_run.measure_trainer(folder, config, 2)
trainers = {role: whole_run.trainer_share(each) for role, each in peaks.items()}
stages = GpuMemory(config, 1 << 37, Shares(engine=[EngineShare(0, 0, 0, 0, 0)], trainers=trainers, bucket_bytes=0)).stages
print(json.dumps({
    stage: sum(nbytes for part, nbytes in parts.items() if part != BESIDE and not part.startswith("engine"))
    for stage, parts in stages.items()
}))
"""
STAGE_OF = {
    "old_log_probs": "log_probs", "reference_log_probs": "reference", "values": "values",
    "update_critic": "update_critic", "update_actor": "update_actor",
}  # fmt: skip
LEAN = ["--algorithm.advantage", "grpo", "--algorithm.kl_placement", "none"]
RUN = [
    "--run.steps", "2", "--rollout.ignore_eos", "true", "--rollout.max_response_tokens", "960",
    "--task.max_prompt_tokens", "64", "--rollout.prompts_per_step", "2", "--rollout.responses_per_prompt", "2", "--actor.minibatch_size", "4",
    "--actor.microbatch_size", "2",
    "--model.weights", "random", "--weights.transport", "pull", "--engine.args.mem_fraction_static", "0.2",
]  # fmt: skip


def widths(**sizes: float) -> list[str]:
    sizes["initializer_range"] = 0.8 * sizes["hidden_size"] ** -0.5  # as tiny models: logits that bfloat16 can tell
    return [word for name, value in sizes.items() for word in (f"--model.overrides.{name}", str(value))]


def deepseek_of_true_widths(experts: int) -> list[str]:
    """Three layers, of fewer experts than the model has, so that AdamW's states fit."""
    return [
        "--model.name", "deepseek_v3", *LEAN, "--actor.gradient_checkpointing", "true",
        *widths(hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=3, vocab_size=32768,
                num_attention_heads=128, num_key_value_heads=128, n_routed_experts=experts, num_experts_per_tok=8, n_group=4,
                topk_group=4, first_k_dense_replace=1, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
                qk_rope_head_dim=64, v_head_dim=128),
    ]  # fmt: skip


DENSE = [
    "--model.name", "qwen2",
    *widths(hidden_size=1536, intermediate_size=8960, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=2,
            vocab_size=151936),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "gpus", "gib"),
    [(deepseek_of_true_widths(16), 1, 100), (deepseek_of_true_widths(48), 2, 75), (DENSE, 1, 60)],
    ids=["deepseek_v3 of real widths", "deepseek_v3 of real widths, two ranks", "qwen2 with critic and reference"],
)
def test_peaks_of_a_step_are_those_that_were_executed_without_a_gpu(
    words: list[str], gpus: int, gib: int, tmp_path: Path
) -> None:
    if torch.cuda.device_count() < gpus or torch.cuda.get_device_properties(0).total_memory < gib * GIB:
        pytest.skip(f"needs {gpus} GPUs of {gib} GiB")
    config = ["configs/gpu/tiny.toml", "--parallel.tp", str(gpus), *words, *RUN]
    job = run(tmp_path / "run", gpus, *config, seconds=500)
    assert job.process.returncode == 0, job.output()
    measured = {
        STAGE_OF[event["phase"]]: event["memory"]["peak"]
        for event in job.events()
        if event["event"] == "phase_end" and event["phase"] in STAGE_OF
    }  # of the last step: AdamW has its moments from the first one on
    (tmp_path / "model").mkdir()
    command = [sys.executable, "-c", PREDICT, str(tmp_path / "model"), *config]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    predicted = json.loads(done.stdout.splitlines()[-1])
    for stage, peak in measured.items():
        print(f"{stage}: predicted {predicted[stage]:,}, measured {peak:,}, {predicted[stage] / peak - 1:+.1%}")
    for stage, peak in measured.items():
        assert predicted[stage] == pytest.approx(peak, rel=0.05), stage
