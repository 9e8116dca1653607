"""A run that SIGTERM stops, or SIGKILL at random moments, and that is resumed: real torchrun, SGLang and FSDP2."""

import random
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.config.run_folder import checkpoints_in
from tests.end_to_end.launching import QUICKSTART, Job, run
from tests.end_to_end.test_ppo import values

pytestmark = pytest.mark.long

MOMENTS = 20
STEPS = 30
WORDS = [
    *[QUICKSTART, "--run.steps", str(STEPS), "--algorithm.kl_target", "0.1"],
    *["--actor.learning_rate", "1e-3", "--actor.schedule", "cosine", "--actor.warmup_ratio", "0.2"],
]


def rows(job: Job) -> dict[float, dict[str, float]]:
    """Metrics of each step, and of the final check as that of STEPS, without times and memory."""
    return (
        {row.get("step", float(STEPS)): row for row in values(job)} if (job.folder / "metrics.jsonl").exists() else {}
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[float, dict[str, float]]:
    """Rows of a run that nothing interrupts, and that saves nothing."""
    job = run(tmp_path_factory.mktemp("whole") / "run", 2, *WORDS, seconds=2000)
    assert job.process.returncode == 0, job.output()
    return rows(job)


def test_sigterm_saves_and_the_resumed_run_makes_the_rest(whole: dict[float, dict[str, float]], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    words = ["--checkpoint.every", "1000", "--checkpoint.folder", str(folder), "--checkpoint.resume", "latest"]
    job = Job(folder=tmp_path / "first", ranks=2, arguments=[*WORDS, *words]).start()
    job.wait_for_phase("generate", step=2)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() != 0
    assert job.left_behind() == []
    assert "no checkpoint in" in job.output() and "FAILED" not in job.output()
    [saved] = checkpoints_in(folder)
    first = rows(job)
    assert saved.name == f"step-{len(first)}" and 3 <= len(first) < 10
    sentence = f"stopped: SIGTERM came before step {len(first)} of {STEPS}; resume with --checkpoint.resume {saved}."
    assert job.output().splitlines()[-1] == sentence
    model = AutoModelForCausalLM.from_pretrained(saved)
    for name, tensor in load_file(saved / "model.safetensors").items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert AutoTokenizer.from_pretrained(saved).encode("1+1")
    resumed = run(tmp_path / "second", 2, *WORDS, *words, seconds=2000)
    assert resumed.process.returncode == 0, resumed.output()
    assert f"resumed from {saved}: step {len(first)} is next" in resumed.output()
    assert first | rows(resumed) == whole and not first.keys() & rows(resumed).keys()
    assert [each.name for each in checkpoints_in(folder)] == [saved.name, f"step-{STEPS}"]


def test_killed_at_random_moments_it_makes_the_steps_of_a_run_that_never_was(
    whole: dict[float, dict[str, float]], tmp_path: Path
) -> None:
    draw, made, done = random.Random(15), {}, 0
    words = ["--checkpoint.every", "1", "--checkpoint.keep", "2", "--checkpoint.folder", str(tmp_path / "checkpoints")]
    for moment in range(MOMENTS + 1):
        arguments = [*WORDS, *words, "--checkpoint.resume", "latest"]
        job = Job(folder=tmp_path / f"run{moment}", ranks=2, arguments=arguments).start()
        if moment < MOMENTS:
            job.wait_for_phase("resume_weights", seconds=900)
            time.sleep(draw.uniform(0, 4))
            ranks = psutil.Process(job.process.pid).children()
            if draw.random() < 0.5:
                job.kill()
            else:
                draw.choice(ranks).kill()
        code = job.wait(2000)
        found = rows(job)
        made |= found
        assert all(found[step] == whole[step] for step in found), f"of the run after moment {moment}"
        assert job.left_behind() == []
        done += 1
        if code == 0:
            break
    assert made == whole
    assert done > MOMENTS // 2, "the moments came later than the end"
    assert len(checkpoints_in(tmp_path / "checkpoints")) == 2
