"""launch/mismatch.py when an engine really dies, or when transformers refuses a changed trainer."""

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.launching import Job
from tests.tools.mismatch.sources import Planted
from tests.tools.mismatch.test_mismatch import found_line, search

pytestmark = pytest.mark.long

STEPS = "engine.args.num_continuous_decode_steps"
WORDS = (f"--{STEPS}", "2")


def searched(folder: Path, plant: str, words: tuple[str, ...] = WORDS, code: int = 1) -> tuple[dict[str, Any], Job]:
    """Search to the end with this plant; return mismatch.json and the job."""
    ended, answer, job = search(folder, Planted(name=plant, words=words))
    assert ended == code and answer, job.output()[-4000:]
    return answer, job


def rows(answer: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [each for each in answer["sources"] if each["name"] == name]


def test_what_was_measured_before_a_changed_engine_fails_is_kept(tmp_path: Path) -> None:
    answer, job = searched(tmp_path / "run", "second_rank_fails_in_decoding")
    prefill, decoding = rows(answer, STEPS)
    assert prefill["after"] and "in decoding" in decoding["how"]
    why_not = decoding["why_not"]
    assert "scheduler_TP1" in why_not and "RuntimeError: planted: CUDA error" in why_not
    log = Path(why_not.partition("whole log: ")[2].rstrip(")"))
    assert "planted: CUDA error" in log.read_text()  # no later engine has emptied it
    assert found_line(job) == f"found: {answer['sentence']}" and answer["source"] == "decode"
    assert job.left_behind() == []


def test_the_death_of_a_scheduler_that_only_one_rank_hears_of_reaches_all_ranks(tmp_path: Path) -> None:
    answer, job = searched(tmp_path / "run", "second_rank_is_killed_while_asked")
    prefill, outputs = rows(answer, STEPS)
    assert prefill["after"] and "outputs of modules" in outputs["how"]
    assert "scheduler_TP1" in outputs["why_not"] and "died of SIGKILL" in outputs["why_not"]
    assert found_line(job) == f"found: {answer['sentence']}" and job.left_behind() == []


def test_the_death_of_the_runs_own_engine_ends_the_run(tmp_path: Path) -> None:
    code, answer, job = search(tmp_path / "run", Planted(name="own_engine_is_killed", words=WORDS))
    assert code == 1 and not answer
    assert "FIRST FAILURE" in job.output() and "died of SIGKILL" in job.output(), job.output()[-4000:]
    assert "found:" not in job.output() and job.left_behind() == []


def test_a_trainer_that_transformers_refuses_leaves_the_other_sources_to_be_measured(tmp_path: Path) -> None:
    answer, job = searched(tmp_path / "run", "trainer_without_sdpa", (), code=0)
    [refused], [measured] = rows(answer, "trainer attention"), rows(answer, "tensor parallelism")
    assert refused["how"] == "eager -> sdpa" and "scaled_dot_product_attention" in refused["why_not"]
    assert refused["why_not"] in job.output() and measured["after"]
    assert job.output().splitlines()[-1].endswith(f"PASSED: {answer['sentence']}")
