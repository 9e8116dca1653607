"""launch/mismatch.py on real engines with a planted source of mismatch, and without any."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.launching import QUICKSTART, REPOSITORY, Job
from tests.tools.mismatch.sources import PLANTED, Planted

PLANTS = Path(__file__).with_name("plants")
IN_TRAINER = "tests/tools/mismatch/with_plant_in_trainer.py"


def reached_file(job: Job) -> Path:
    """The file that shows that the planted code has run."""
    return job.folder.with_suffix(".reached")


SAMPLE = (
    *("--rollout.prompts_per_step", "8", "--rollout.responses_per_prompt", "2", "--rollout.max_response_tokens", "16"),
    *("--actor.minibatch_size", "16", "--task.template", "Question: {question}\nAnswer: "),
)
"""What the planted sources were measured on: few sequences at a time, and long enough that positions matter."""


def search(
    folder: Path,
    planted: Planted | None = None,
    *words: str,
    config: str = QUICKSTART,
    ranks: int = 2,
    seconds: float = 400,
) -> tuple[int, dict[str, Any], Job]:
    """Run launch/mismatch.py to its end; return the exit code, mismatch.json and the job."""
    script = IN_TRAINER if planted and planted.name.startswith("trainer_") else "launch/mismatch.py"
    job = Job(folder, ranks, [config, *(SAMPLE if config == QUICKSTART else ()), *words], script=script)
    if planted:
        job.arguments += ["--model.name", planted.model, *planted.words]
        path = os.pathsep.join(filter(None, [str(PLANTS), os.environ.get("PYTHONPATH")]))
        job.environment = {"PLANT": planted.name, "PYTHONPATH": path, "PLANT_REACHED": str(reached_file(job))}
    code = job.start().wait(seconds)
    file = folder / "mismatch.json"
    return code, json.loads(file.read_text()) if file.exists() else {}, job


def found_line(job: Job) -> str:
    """The last line, which says what was found; what writes it outlives torchrun by a moment."""
    end = time.monotonic() + 30
    while not (last := job.output().splitlines()[-1]).startswith("found:"):
        assert time.monotonic() < end, job.output()[-4000:]
        time.sleep(0.1)
    return last


def check_answer(planted: Planted, code: int, answer: dict[str, Any], job: Job) -> None:
    """Compare what was found with what is planted."""
    assert reached_file(job).exists(), f"nothing was planted: {planted.name} never ran\n{job.output()[-4000:]}"
    assert code == 1, job.output()[-4000:]
    last = found_line(job)
    if not answer:  # the weights are not the trainer's, and nothing else is measured
        assert last.startswith("found: SOURCE: weights:") and planted.source == "weights"
        return
    assert answer["source"] == planted.source, answer["sentence"]
    # In half precision a setting may show in the log-probs, and no module above its rounding.
    if planted.module and (answer["first"] or answer["dtype"] == "float32"):
        assert answer["first"] and answer["first"]["name"].endswith(planted.module), answer["sentence"]
    assert last == f"found: {answer['sentence']}"


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(each, id=each.name, marks=pytest.mark.slow if each.name == "rope_base" else pytest.mark.long)
        for each in PLANTED
    ],
)
def test_a_planted_source_is_named(planted: Planted, tmp_path: Path) -> None:
    words = ("--parallel.tp", str(planted.ranks))
    check_answer(planted, *search(tmp_path / "run", planted, *words, ranks=planted.ranks))


@pytest.mark.long
def test_engine_and_trainer_that_agree_are_not_accused(tmp_path: Path) -> None:
    words = ("--model.name", "deepseek_v3")
    code, answer, job = search(tmp_path / "run", None, *words, config="configs/cpu/mtp.toml")
    assert code == 0 and answer["agrees"] and answer["source"] == "", job.output()[-4000:]
    assert "PASSED: engine and trainer agree" in job.output().splitlines()[-1]
    # The program to attach needs nothing of this repository.
    program = [sys.executable, str(tmp_path / "run" / "mismatch_repro.py")]
    alone = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    shown = subprocess.run(program, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0 and "mean difference" in shown.stdout, shown.stdout + shown.stderr


def test_half_a_run_has_nothing_to_compare() -> None:
    command = [sys.executable, "launch/mismatch.py", QUICKSTART, "--rollout.only", "true"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and "rollout.only" in run.stderr.splitlines()[-1]
