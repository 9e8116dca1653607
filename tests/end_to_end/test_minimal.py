"""launch/minimal.py: its pure functions beside the harness's, and whole runs under torchrun with real SGLang on CPU."""

import ast
import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file

from harness.trainer.advantages import grpo
from harness.trainer.losses import log_probs_from_logits, policy_loss
from tests.end_to_end.launching import MARK, REPOSITORY, Job

SCRIPT = REPOSITORY / "launch" / "minimal.py"
VERDICT = re.compile(r"(PASSED|FAILED): (\d) of 3 steps, (\d) syncs proven; worst log-prob difference (\S+) nats", re.M)


def load_minimal() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["minimal"] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


minimal = load_minimal()


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("--tp 0", "--tp and --steps must be at least 1, got 0 and 3"),
        ("--steps -1", "got 2 and -1"),
        ("--skip-sync 3", "--skip-sync must be below --steps = 3, got 3"),
        ("--model qwen_2", "--model must be qwen2 or deepseek_v3, or a folder with a config.json, got qwen_2"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_is_imported(words: str, wrong: str) -> None:
    done = subprocess.run([sys.executable, "-S", SCRIPT, *words.split()], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.strip().endswith(wrong)


@dataclass
class MinimalJob(Job):
    """A torchrun of launch/minimal.py, which finds the CPU stand-ins by itself and has no run directory."""

    memory: set[Path] = field(default_factory=set)
    """The files in /dev/shm that SGLang's processes were seen to use, removed ones included."""

    def start(self) -> "MinimalJob":
        self.log = self.folder.with_suffix(".log")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [*torchrun, str(SCRIPT), *self.arguments],
                cwd=self.folder.parent,
                env=os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def watch_until(self, line: str) -> None:
        """Return when a line of the output starts like this, or at the end."""
        while self.process.poll() is None and not re.search(rf"s\] {line}", self.output()):
            self.look()
            for process in self.seen:
                with contextlib.suppress(psutil.Error):
                    self.memory |= {Path(each.path.removesuffix(" (deleted)")) for each in process.memory_maps()}
            time.sleep(0.3)
        self.memory = {file for file in self.memory if file.match("/dev/shm/sgl*")}

    def assert_nothing_is_left(self) -> None:
        """Of what was watched, no file and no process may outlive the job."""
        assert self.memory and not any(file.exists() for file in self.memory)
        assert self.left_behind() == []


def run_minimal(folder: Path, ranks: int, *arguments: str) -> tuple[MinimalJob, tuple[str, ...]]:
    """Run to the end; return the job, and (word, steps, proven syncs, worst difference) of its verdict."""
    job = MinimalJob(folder=folder / "minimal", ranks=ranks, arguments=list(arguments)).start()
    job.watch_until("(PASSED|FAILED)")
    job.wait()
    verdicts = VERDICT.findall(job.output())
    assert len(verdicts) == 1, job.output()[-4000:]
    job.assert_nothing_is_left()
    return job, verdicts[0]


def test_it_is_one_file_without_the_harness() -> None:
    source = SCRIPT.read_text(encoding="utf-8")
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).split(".")[0])
    assert {"torch", "transformers", "sglang"} <= imported
    assert "harness" not in imported
    assert imported - {"torch", "transformers", "sglang"} <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("visible", "ranks", "expected"),
    [
        ([None] * 4, [2, 3], "2,3"),
        (["4,5,6,7"] * 4, [2, 3], "6,7"),
        (["3,1,2,0"] * 4, [0, 1], "3,1"),
        (["GPU-8a, GPU-2b"] * 2, [0, 1], "GPU-8a,GPU-2b"),
        (["MIG-6c/1/0,MIG-6c/2/0"] * 2, [1], "MIG-6c/2/0"),
        (["5", "2"], [0, 1], "5,2"),
        (["0,1,2,3,4,5,6,7"] * 2, [0, 1], "0,1"),
    ],
)
def test_the_engine_gets_the_gpus_of_its_ranks(visible: list[str | None], ranks: list[int], expected: str) -> None:
    assert minimal.engine_gpus(visible, ranks) == expected


@pytest.mark.parametrize("visible", [["0,1"] * 4, ["7", "7"], ["GPU-8a"] * 2])
def test_two_ranks_on_one_gpu_are_refused(visible: list[str | None]) -> None:
    with pytest.raises(ValueError, match="each rank must have a GPU of its own"):
        minimal.engine_gpus(visible, [0, 1])


def test_the_engine_inherits_nothing_of_torchrun() -> None:
    torchrun = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "ROLE_RANK": "0",
        "ROLE_NAME": "default",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    kept = {"PATH": "/usr/bin", "HF_HOME": "/x", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert minimal.clean_environment(torchrun | kept) == kept


def test_ports_of_engines_differ() -> None:
    assert len(set(minimal.free_ports(16))) == 16


def test_advantages_are_those_of_the_harness() -> None:
    rewards = torch.tensor([[0.25, 0.5, 0.5, 1.0], [0.0, 0.0, 0.0, 0.0], [0.3, 0.1, 0.2, 0.7]])
    flat = rewards.flatten()[:, None]
    expected = grpo(flat, torch.ones_like(flat), torch.arange(3).repeat_interleave(4))
    torch.testing.assert_close(minimal.grpo_advantages(rewards).flatten(), expected[:, 0], rtol=1e-5, atol=1e-6)


def test_the_loss_and_its_gradient_are_those_of_the_harness() -> None:
    generator = torch.Generator().manual_seed(0)
    # The ratios stay below the dual clip, which minimal.py does without.
    old, new = (torch.randn(6, 5, generator=generator) * 0.2 - 3 for _ in range(2))
    advantages = torch.randn(6, generator=generator)
    gradients = []
    for tokens in (
        lambda log_probs: minimal.clipped_surrogate(log_probs, old, advantages, 0.2),
        lambda log_probs: policy_loss(log_probs, old, advantages[:, None].expand(6, 5), 0.2, 0.2)[0],
    ):
        log_probs = new.clone().requires_grad_()
        loss = tokens(log_probs)
        loss.mean().backward()
        gradients.append((loss.detach(), log_probs.grad))
    assert (gradients[0][0] != -advantages[:, None] * (new - old).exp()).any(), "nothing was clipped"
    torch.testing.assert_close(gradients[0], gradients[1])


def test_log_probs_are_those_of_the_harness() -> None:
    settings = minimal.Settings(prompt_tokens=3, response_tokens=4, temperature=0.7)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(11, (2, 7), generator=generator)
    logits = torch.randn(2, 7, 11, generator=generator)
    found = minimal.response_log_probs(lambda **_: SimpleNamespace(logits=logits), ids, settings)
    torch.testing.assert_close(found, log_probs_from_logits(logits[:, 2:6], ids[:, 3:], temperature=0.7))


def written_and_sent(name: str, folder: Path) -> tuple[list[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]:
    """What a sync sends, call by call, and what the checkpoint holds."""
    minimal.write_model(str(folder), name, minimal.tiny_shape(name), 0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return list(minimal.checkpoint_tensors(model)), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["qwen2", "deepseek_v3"])
def test_a_sync_sends_what_save_pretrained_writes(name: str, tmp_path: Path) -> None:
    calls, saved = written_and_sent(name, tmp_path)
    assert sum(map(len, calls)) == len(saved), "a tensor was sent twice"
    sent = {key: tensor for tensors in calls for key, tensor in tensors.items()}
    torch.testing.assert_close(sent, dict(saved), rtol=0, atol=0)
    assert not [key for key, tensor in sent.items() if tensor.ndim == 1 and tensor.unique().numel() == 1]


def test_a_call_has_all_that_sglang_fuses(tmp_path: Path) -> None:
    calls, _ = written_and_sent("deepseek_v3", tmp_path)
    layers = {"layers." + key.split(".")[2] for tensors in calls for key in tensors if ".layers." in key}
    assert layers == {"layers.0", "layers.1"}
    for layer in layers:
        (whole,) = [tensors for tensors in calls if any(f".{layer}." in key for key in tensors)]
        parts = {key.removeprefix(f"model.{layer}.") for key in whole}
        assert {"self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"} <= parts
        if layer == "layers.1":
            assert {f"mlp.experts.{expert}.gate_proj.weight" for expert in range(16)} <= parts
            assert whole[f"model.{layer}.mlp.gate.e_score_correction_bias"].dtype == torch.float32


@pytest.mark.long
def test_deepseek_v3_passes_on_two_engines_of_two_ranks(tmp_path: Path) -> None:
    job, (word, steps, proven, worst) = run_minimal(tmp_path, 4, "--model", "deepseek_v3", "--tp", "2")
    assert (job.process.returncode, word, steps, proven) == (0, "PASSED", "3", "3")
    assert 0 < float(worst) < 1e-5


@pytest.mark.long
def test_a_sync_of_a_checkpoint_folder_that_is_left_out_fails(tmp_path: Path) -> None:
    minimal.write_model(str(tmp_path / "model"), "qwen2", minimal.tiny_shape("qwen2"), 5)
    words = ["--model", str(tmp_path / "model"), "--skip-sync", "1"]
    job, (word, steps, proven, worst) = run_minimal(tmp_path, 2, *words)
    assert (job.process.returncode, word, steps, proven) == (1, "FAILED", "2", "1")
    assert float(worst) > 1e-2


def test_a_scheduler_that_fails_between_two_calls_ends_its_rank(tmp_path: Path) -> None:
    # The engine here sets the handler that SGLang sets at its first call, and nothing else of it matters.
    program = tmp_path / "program.py"
    program.write_text("""
import os, signal, types, torch.distributed as dist, uvloop
from torch.distributed.device_mesh import init_device_mesh
from tests.end_to_end.test_minimal import minimal

loop = uvloop.new_event_loop()

async def generate():
    loop.add_signal_handler(signal.SIGQUIT, print, "only heard while a call runs")

signal.signal(signal.SIGQUIT, lambda *_: os._exit(9))  # as SGLang's launch does, in its way
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
engine = types.SimpleNamespace(generate=lambda: loop.run_until_complete(generate()))
minimal.call(engine, mesh, "generate")
signal.raise_signal(signal.SIGQUIT)
minimal.call(engine, mesh, "generate")
""")
    done = subprocess.run([sys.executable, program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 9, done.stderr


@pytest.mark.long
def test_nothing_outlives_a_scheduler_that_is_killed(tmp_path: Path) -> None:
    job = MinimalJob(folder=tmp_path / "minimal", ranks=2, arguments=["--steps", "1000"]).start()
    job.watch_until("step 0")
    (scheduler,) = [process for process in job.processes() if process.name().startswith("sglang::scheduler_TP1")]
    scheduler.send_signal(signal.SIGKILL)
    assert job.wait() == 1
    job.assert_nothing_is_left()
