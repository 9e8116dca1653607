"""Sleep, wake and offload on GPUs: the bytes that really move, and what fits only because they do."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.runtime import GIB
from tests.end_to_end.launching import REPOSITORY, Job, run

pytestmark = pytest.mark.gpu

TINY = "configs/gpu/tiny.toml"
STEADY = (TINY, "--actor.learning_rate", "1e-3", "--actor.ppo_epochs", "1")
"""Two such runs differ by rounding alone: large steps, and several passes, make more of it."""
OFFLOAD_ALL = [
    *["--memory.offload_parameters", "actor,critic,reference", "--memory.offload_optimizer", "actor,critic"],
]


def need(gpus: int, gib_each: int = 0) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs, has {torch.cuda.device_count()}")
    if torch.cuda.get_device_properties(0).total_memory < gib_each * GIB:
        pytest.skip(f"needs GPUs of {gib_each} GiB")


def moves(job: Job, rank: int) -> list[dict[str, Any]]:
    return [event for event in job.events(rank) if event["event"] == "memory_moved"]


def at_end_of(job: Job, phase: str, figure: str) -> int:
    """Of rank 0, in the last step."""
    ends = [each for each in job.events() if each["event"] == "phase_end" and each["phase"] == phase]
    figures: dict[str, int] = ends[-1]["memory"]
    return figures[figure]


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Job:
    need(2)
    return run(tmp_path_factory.mktemp("staged") / "run", 2, *STEADY, seconds=400)


def test_each_stage_moves_its_bytes_on_every_rank(staged: Job) -> None:
    assert staged.process.returncode == 0, staged.output()
    for rank in range(2):
        seen = moves(staged, rank)
        assert [event["action"] for event in seen[:4]] == ["release", "release", "resume", "resume"]
        assert all(event["moved"] > GIB for event in seen if event["tags"] == ["kv_cache"])
        assert all(event["moved"] > 0 for event in seen)
        assert sum(event["expected"] is None for event in seen) == 2, "only the first release of each tag"


def test_the_timeline_shows_the_engine_come_and_go(staged: Job) -> None:
    first = staged.metrics()[0]
    engine = {phase: first[f"memory/{phase}/engine"] for phase in ("resume_weights", "resume_kv_cache", "release")}
    assert engine["resume_kv_cache"] > engine["resume_weights"] + GIB
    assert engine["release"] < engine["resume_weights"] < engine["resume_kv_cache"]
    assert first["memory/sync/extra"] >= 0 and first["memory/free_caches/used"] > 0


def test_at_once_wakes_both_in_one_call(tmp_path: Path) -> None:
    need(2)
    job = run(tmp_path / "run", 2, TINY, "--memory.resume", "all", seconds=400)
    assert job.process.returncode == 0, job.output()
    assert [event["tags"] for event in moves(job, 0)][:3] == [["kv_cache"], ["weights"], ["weights", "kv_cache"]]


@pytest.mark.parametrize("mode", ["staged", "all"])
def test_cuda_graphs_are_released_and_resumed(mode: str, tmp_path: Path) -> None:
    need(2)
    graphs = ["--engine.args.disable_cuda_graph", "false", "--engine.args.max_running_requests", "32"]
    job = run(tmp_path / "run", 2, TINY, *graphs, "--memory.resume", mode, seconds=580)
    assert job.process.returncode == 0, job.output()
    for rank in range(2):
        seen = moves(job, rank)
        assert [event["tags"] for event in seen[:3]] == [["kv_cache"], ["weights"], ["cuda_graph"]]
        resumed = [event["tags"] for event in seen if event["action"] == "resume"]
        each = [["cuda_graph", "weights", "kv_cache"]] if mode == "all" else [["weights"], ["cuda_graph", "kv_cache"]]
        # Before each of three steps and the last check, and for the baseline before them.
        assert resumed == each * 5
        assert all(event["moved"] > 0 for event in seen)


def test_graphs_of_sglangs_preset_stay_where_they_are(tmp_path: Path) -> None:
    need(2)
    words = ["--engine.preset", "sglang", "--engine.args.max_running_requests", "32"]
    job = run(tmp_path / "run", 2, TINY, *words, seconds=580)
    assert job.process.returncode == 0, job.output()
    seen = moves(job, 0)
    assert seen and all(event["moved"] > 0 for event in seen)
    assert not any("cuda_graph" in event["tags"] for event in seen)


def test_offload_leaves_the_gpu_and_changes_no_result(staged: Job, tmp_path: Path) -> None:
    job = run(tmp_path / "run", 2, *STEADY, *OFFLOAD_ALL, seconds=400)
    assert job.process.returncode == 0, job.output()
    for mine, other in zip(job.metrics()[:3], staged.metrics()[:3], strict=True):
        for name in ("actor/grad_norm", "critic/grad_norm", "actor/entropy"):
            assert mine[name] == pytest.approx(other[name], rel=0.05)
    # Of an element: 4 bytes of actor and critic and 2 of the reference, which were built, and 16 of AdamW's two states
    # of two models, which makes 26/10 of what was built. The sync's buffers and cuBLAS's workspaces stay: for a model
    # as small as this they are most of what is used.
    left = at_end_of(staged, "free_caches", "used") - at_end_of(job, "free_caches", "used")
    assert left > 2.3 * at_end_of(staged, "build_trainer", "used")


def test_without_the_saver_nothing_moves_and_the_run_says_so(tmp_path: Path) -> None:
    need(2)
    job = run(tmp_path / "run", 2, TINY, "--engine.args.enable_memory_saver", "false", seconds=400)
    assert job.process.returncode == 0, job.output()
    assert moves(job, 0) == []
    assert job.output().count("no torch_memory_saver") == 1


def test_any_order_of_tags_and_what_is_refused(tmp_path: Path) -> None:
    need(2)
    script = str(Path(__file__).with_name("memory_stages_on_gpu.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    ranks = json.loads((tmp_path / "seen.json").read_text())
    for seen in ranks:
        assert seen["after"] == [seen["before"]] * 9
        assert seen["still_serving"] == seen["before"]
        assert len(seen["facts"]) == 9 * 2 + 6 * 2 + 3 * 1, "a release each tag, resumes as asked"
        assert [text.split(":")[0] for text in seen["refused"]] == ["WrongStage"] * 3
        assert "freed" in seen["saver_off"] and "the memory saver did not hold them" in seen["saver_off"]


@pytest.mark.long
def test_memory_after_step_20_is_that_after_step_3(tmp_path: Path) -> None:
    need(2)
    job = run(tmp_path / "run", 2, TINY, "--run.steps", "20", seconds=580)
    assert job.process.returncode == 0, job.output()
    ends = [step["memory/end"] for step in job.metrics()[:20]]
    assert all(end == pytest.approx(ends[2], rel=0.01) for end in ends[3:])


@pytest.mark.long
def test_qwen2_7b_fits_in_stages_and_not_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2-7B's shape on four GPUs; on two, half of its layers: as much on each GPU."""
    need(2, gib_each=130)
    ranks, layers = (4, 28) if torch.cuda.device_count() >= 4 else (2, 14)
    words = [
        "configs/gpu/memory_7b.toml",
        "--parallel.tp",
        str(ranks),
        "--model.overrides.num_hidden_layers",
        str(layers),
    ]
    monkeypatch.setenv("NCCL_DEBUG", "WARN")  # else a rank may only hear that a CUDA call of NCCL's has failed
    job = run(tmp_path / "staged", ranks, *words, seconds=580)
    assert job.process.returncode == 0, job.output()
    control = run(tmp_path / "all", ranks, *words, "--memory.resume", "all", seconds=580)
    assert control.process.returncode != 0
    logs = control.output() + "".join(file.read_text(errors="replace") for file in control.folder.rglob("*.log"))
    said = "\n".join(line for line in logs.splitlines() if "FIRST FAILURE" in line or "Error" in line)
    assert "out of memory" in logs, said
    assert control.left_behind() == []
