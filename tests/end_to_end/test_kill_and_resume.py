"""A run that SIGTERM stops, or SIGKILL at random moments, and that is resumed: real torchrun, SGLang and FSDP2."""

import random
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.config.checkpoint_folder import checkpoints_in, step_of
from tests.end_to_end.launching import QUICKSTART, Job, run
from tests.end_to_end.test_ppo import values

pytestmark = pytest.mark.long

MOMENTS = 3
STEPS = 14
WORDS = [
    *[QUICKSTART, "--run.steps", str(STEPS)],
    *["--actor.learning_rate", "1e-3", "--actor.schedule", "cosine", "--actor.warmup_steps", "2"],
]
SECONDS = 600


def rows(job: Job) -> dict[float, dict[str, float]]:
    """Metrics of each step, and of the final check as that of STEPS, without times and memory."""
    return (
        {row.get("step", float(STEPS)): row for row in values(job)} if (job.folder / "metrics.jsonl").exists() else {}
    )


def whole(folder: Path) -> tuple[dict[float, dict[str, float]], float]:
    """Rows of a run that nothing interrupts, and that saves nothing, and the seconds of a step."""
    job = run(folder, 2, *WORDS, seconds=SECONDS)
    assert job.process.returncode == 0, job.output()
    return rows(job), sorted(row["seconds"] for row in job.metrics()[:STEPS])[STEPS // 2]


def test_killed_and_told_to_end_it_makes_the_steps_of_a_run_that_never_was(tmp_path: Path) -> None:
    """SIGKILL at random moments, then SIGTERM twice, each time resumed; the last run makes the rest."""
    draw, (expected, step_seconds) = random.Random(15), whole(tmp_path / "whole")
    made: dict[float, dict[str, float]] = {}
    folder, rollouts = tmp_path / "checkpoints", tmp_path / "rollouts"
    resume = [*WORDS, "--checkpoint.folder", str(folder), "--checkpoint.resume", "latest"]
    arguments = [*resume, "--checkpoint.every", "1", "--checkpoint.keep", "2"]
    for moment in range(MOMENTS):
        job = Job(folder=tmp_path / f"run{moment}", ranks=2, arguments=arguments).start()
        job.wait_for_phase("resume_weights", seconds=SECONDS, step=next_step(folder) + draw.randrange(2))
        time.sleep(draw.uniform(0, 1.2 * step_seconds))
        if draw.random() < 0.5:
            job.kill()
        else:
            draw.choice(job.rank_processes()).kill()
        assert job.wait(SECONDS) != 0, job.output()
        assert job.left_behind(60) == []
        assert moment or "no checkpoint in" in job.output()
        found = rows(job)
        assert all(row == expected[step] for step, row in found.items()), f"of the run that moment {moment} ended"
        made |= found
        print(f"moment {moment}: rows of {sorted(found)}", flush=True)
    first_saved = next_step(folder)
    for receiver in ("torchrun", "every process, as SLURM does"):
        # Only SIGTERM has this run save.
        words = [*resume, "--checkpoint.every", "1000", "--rollout.save", str(rollouts)]
        made |= told_to_end(
            Job(folder=tmp_path / receiver.partition(" ")[0], ranks=2, arguments=words), folder, receiver
        )
    saved = checkpoints_in(folder)[-1]
    last = run(tmp_path / "last", 2, *arguments, "--rollout.save", str(rollouts), seconds=SECONDS)
    assert last.process.returncode == 0, last.output()
    assert f"resumed from {saved}: step {step_of(saved)} is next" in last.output()
    assert made | rows(last) == expected and not made.keys() & rows(last).keys()
    assert [each.name for each in checkpoints_in(folder)] == [f"step-{STEPS - 1}", f"step-{STEPS}"]
    files = len(list(rollouts.iterdir()))
    assert files == 2 * (STEPS + 1 - first_saved), "each step's and the final check's, of both ranks"
    again = run(tmp_path / "again", 2, *arguments, seconds=SECONDS)
    assert again.process.returncode == 0, again.output()
    assert rows(again) == {STEPS: expected[STEPS]}, "the final check alone"


def next_step(folder: Path) -> int:
    return step_of(checkpoints_in(folder)[-1]) if checkpoints_in(folder) else 0


def told_to_end(job: Job, folder: Path, receiver: str) -> dict[float, dict[str, float]]:
    """Send SIGTERM as the second step generates; the run makes that step and saves. Return its rows."""
    start = next_step(folder)
    job.start().wait_for_phase("generate", seconds=SECONDS, step=start + 1)
    for process in [job.process] if receiver == "torchrun" else job.processes():
        process.send_signal(signal.SIGTERM)
    assert job.wait(SECONDS) == 143
    assert job.left_behind() == []
    assert "FAILED" not in job.output()
    found, saved = rows(job), checkpoints_in(folder)[-1]
    stopped_before = start + len(found)
    assert saved.name == f"step-{stopped_before}" and 2 <= len(found) < 8 and stopped_before < STEPS
    sentence = (
        f"stopped: SIGTERM came before step {stopped_before} of {STEPS}; resume with --checkpoint.resume {saved}."
    )
    assert job.output().splitlines()[-1] == sentence
    model = AutoModelForCausalLM.from_pretrained(saved)
    for name, tensor in load_file(saved / "model.safetensors").items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert AutoTokenizer.from_pretrained(saved).encode("1+1")
    return found
