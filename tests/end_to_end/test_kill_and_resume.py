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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[float, dict[str, float]], float]:
    """Rows of a run that nothing interrupts, and that saves nothing, and the seconds of a step."""
    job = run(tmp_path_factory.mktemp("whole") / "run", 2, *WORDS, seconds=SECONDS)
    assert job.process.returncode == 0, job.output()
    return rows(job), sorted(row["seconds"] for row in job.metrics()[:STEPS])[STEPS // 2]


@pytest.mark.parametrize("receiver", ["torchrun", "every process, as SLURM does"])
def test_sigterm_saves_and_the_resumed_run_makes_the_rest(receiver: str, whole: tuple, tmp_path: Path) -> None:
    folder, rollouts = tmp_path / "checkpoints", tmp_path / "rollouts"
    words = ["--checkpoint.every", "1000", "--checkpoint.folder", str(folder), "--checkpoint.resume", "latest"]
    words += ["--rollout.save", str(rollouts)]
    job = Job(folder=tmp_path / "first", ranks=2, arguments=[*WORDS, *words]).start()
    job.wait_for_phase("generate", step=2)
    for process in [job.process] if receiver == "torchrun" else job.processes():
        process.send_signal(signal.SIGTERM)
    assert job.wait(SECONDS) == 143
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
    if receiver != "torchrun":
        return
    resumed = run(tmp_path / "second", 2, *WORDS, *words, seconds=SECONDS)
    assert resumed.process.returncode == 0, resumed.output()
    assert f"resumed from {saved}: step {len(first)} is next" in resumed.output()
    assert first | rows(resumed) == whole[0] and not first.keys() & rows(resumed).keys()
    assert [each.name for each in checkpoints_in(folder)] == [saved.name, f"step-{STEPS}"]
    assert len(list(rollouts.iterdir())) == 2 * (STEPS + 1), "each step's and the final check's, of both ranks"
    again = run(tmp_path / "third", 2, *WORDS, *words, seconds=SECONDS)
    assert again.process.returncode == 0, again.output()
    assert rows(again) == {STEPS: whole[0][STEPS]}, "the final check alone"


def test_killed_at_random_moments_it_makes_the_steps_of_a_run_that_never_was(whole: tuple, tmp_path: Path) -> None:
    draw, made, (expected, step_seconds) = random.Random(15), {}, whole
    folder = tmp_path / "checkpoints"
    words = ["--checkpoint.every", "1", "--checkpoint.keep", "2", "--checkpoint.folder", str(folder)]
    arguments = [*WORDS, *words, "--checkpoint.resume", "latest"]
    for moment in range(MOMENTS):
        job = Job(folder=tmp_path / f"run{moment}", ranks=2, arguments=arguments).start()
        next_step = step_of(checkpoints_in(folder)[-1]) if checkpoints_in(folder) else 0
        job.wait_for_phase("resume_weights", seconds=SECONDS, step=next_step + draw.randrange(2))
        time.sleep(draw.uniform(0, 1.2 * step_seconds))
        if draw.random() < 0.5:
            job.kill()
        else:
            draw.choice(job.rank_processes()).kill()
        assert job.wait(SECONDS) != 0, job.output()
        assert job.left_behind(60) == []
        found = rows(job)
        assert all(row == expected[step] for step, row in found.items()), f"of the run that moment {moment} ended"
        made |= found
        print(f"moment {moment}: from step {next_step}, rows of {sorted(found)}", flush=True)
    last = run(tmp_path / "last", 2, *arguments, seconds=SECONDS)
    assert last.process.returncode == 0, last.output()
    assert made | rows(last) == expected
    assert [each.name for each in checkpoints_in(folder)] == [f"step-{STEPS - 1}", f"step-{STEPS}"]
