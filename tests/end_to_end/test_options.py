"""What a PPO step can be asked for beside the quickstart's, on two real ranks: each key that no other job turns on."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.end_to_end.launching import QUICKSTART, run

pytestmark = pytest.mark.long

REWARD = '''
"""A user's own reward, as verl calls it."""
import dataclasses


@dataclasses.dataclass
class Seen:
    calls: int = 0


def score(data_source, solution_str, ground_truth, extra_info):
    assert data_source == "lighteval/MATH" and ground_truth.isdigit()
    return {"score": len(set(solution_str)) + 100 * extra_info["index"], "acc": 1}
'''


def write_rows(folder: Path, rows: int = 64) -> Path:
    """Rows as verl's examples have them, with a ground truth of one digit, which random text hits at times."""
    folder.mkdir()
    with (folder / "train.jsonl").open("w") as file:
        for index in range(rows):
            asked = {"role": "user", "content": f"What is {index % 10}?"}
            row = {"prompt": [asked], "data_source": "lighteval/MATH", "extra_info": {"index": index}}
            file.write(json.dumps(row | {"reward_model": {"style": "rule", "ground_truth": str(index % 10)}}) + "\n")
    return folder


def test_a_warm_up_a_schedule_and_packed_batches_on_two_engines_and_the_learner_alone_repeats_them(
    tmp_path: Path,
) -> None:
    words = [
        *[QUICKSTART, "--parallel.dp", "2", "--parallel.tp", "1", "--task.max_prompt_tokens", "128"],
        *["--algorithm.critic_warmup", "1", "--actor.schedule", "linear"],
        *["--model.packed", "true", "--actor.tokens_per_microbatch", "256"],
    ]
    trackers = ["--trackers.names", "tensorboard"] if importlib.util.find_spec("tensorboard") else []
    job = run(tmp_path / "run", 2, *words, *trackers, "--rollout.save", f"{tmp_path}/saved")
    assert job.process.returncode == 0, job.output()
    *steps, _ = job.metrics()
    assert [any(name.startswith("actor/") for name in step) for step in steps] == [False, True, True]
    assert all(step["critic/grad_norm"] > 0 for step in steps)
    rates = [step["actor/learning_rate"] for step in steps[1:]]
    assert 2e-2 > rates[0] > rates[1] >= 0, "linear: down to 0 at the end of the run"
    assert bool(trackers) == bool(list((tmp_path / "run").glob("tensorboard/events.*")))
    alone = run(tmp_path / "alone", 2, *words, "--rollout.load", f"{tmp_path}/saved")
    assert alone.process.returncode == 0, alone.output()
    for step, repeated in zip(steps, alone.metrics(), strict=True):
        learned = [name for name in step if name.startswith(("actor/", "critic/", "reference_kl"))]
        assert {name: step[name] for name in learned} == {name: repeated[name] for name in learned}


def test_what_is_said_to_have_no_effect_has_none(tmp_path: Path) -> None:
    words = [QUICKSTART, "--algorithm.advantage", "grpo", "--algorithm.kl_placement", "none", "--run.steps", "2"]
    words += ["--actor.tokens_per_microbatch", "512", "--task.max_prompt_tokens", "128"]
    unread = {
        **{"critic.learning_rate": "0.1", "algorithm.gamma": "0.5", "algorithm.lam": "0.5"},
        **{"algorithm.kl_coefficient": "1", "actor.microbatch_size": "1"},
        **{"parallel.rank_order": "dp,pp,tp", "weights.folder": str(tmp_path / "weights"), "validation.rows": "1"},
        **{"checkpoint.keep": "1", "checkpoint.folder": str(tmp_path / "kept"), "trackers.experiment": "x"},
    }
    jobs = [
        run(tmp_path / "plain", 2, *words),
        run(tmp_path / "with", 2, *words, *(word for key, value in unread.items() for word in (f"--{key}", value))),
    ]
    for job in jobs:
        assert job.process.returncode == 0, job.output()
    said = "\n".join(line for line in jobs[1].output().splitlines() if " no effect: " in line)
    assert [key for key in unread if f"{key} = " not in said] == []
    timed = ("seconds", "memory/", "startup/", "tokens_per_second/")
    measured = [
        [{key: row[key] for key in row if not key.startswith(timed)} for row in job.metrics() if row["kind"] == "step"]
        for job in jobs
    ]
    assert measured[0] == measured[1]
    assert not (tmp_path / "weights").exists() and not (tmp_path / "kept").exists()


def test_a_users_own_reward_from_a_file_with_rloo(tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text(REWARD)
    words = ["--task.source", str(write_rows(tmp_path / "rows")), "--task.max_prompt_tokens", "128"]
    words += ["--task.reward", f"{tmp_path}/my_reward.py:score", "--algorithm.advantage", "rloo"]
    job = run(tmp_path / "run", 2, QUICKSTART, *words)
    assert job.process.returncode == 0, job.output()
    steps = job.metrics()[:3]
    assert all(step["reward_mean"] > 100 and step["actor/grad_norm"] > 0 for step in steps), steps
    assert not any(name.startswith("critic/") for step in steps for name in step)
    assert job.left_behind() == []


def test_math_verify_scores_what_the_engine_answers(tmp_path: Path) -> None:
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    words = ["--task.source", str(write_rows(tmp_path / "rows")), "--task.max_prompt_tokens", "128"]
    words += ["--task.reward", "math", "--rollout.prompts_per_step", "16", "--rollout.responses_per_prompt", "4"]
    job = run(tmp_path / "run", 2, QUICKSTART, *words, "--rollout.only", "--rollout.save", f"{tmp_path}/saved")
    assert job.process.returncode == 0, job.output()
    assert all(0 <= step["reward_mean"] <= 1 for step in job.metrics())
    assert job.left_behind() == [], "nor the processes that compare"
