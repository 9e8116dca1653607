"""Whole runs of two ranks as a table: what each is given, and all that such a run can show.

A run is here for a model, a transport, an option or a fault that no other run has. Of each, its exit code is looked at,
and that it leaves no process. The quickstart itself is in test_ppo.py.
"""

import importlib.util
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.launching import DP_AND_EP, QUICKSTART, Job, run
from tests.end_to_end.test_ppo import quickstart, values  # noqa: F401
from tests.real_bugs.bug import Bug
from tests.real_bugs.sender import nothing_sent

Values = list[dict[str, float]]
TRACKERS = "--trackers.names tensorboard" if importlib.util.find_spec("tensorboard") else ""
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


@dataclass(frozen=True)
class Ran:
    """A run that has ended."""

    job: Job
    folder: Path
    """{folder} of its words."""
    plain: Callable[[], Values]
    """Return the metrics of the quickstart, without times."""
    before: Job | None = None
    """Of a run that follows another, that one."""

    def steps(self) -> Values:
        return [row for row in self.job.metrics() if row["kind"] == "step"]


@dataclass(frozen=True)
class RunCase:
    """One run, and what it must show."""

    words: str = ""
    """After the config; {folder} is one that lives as long as the runs of this case."""
    checks: Sequence[Callable[[Ran], None]] = ()
    says: Sequence[str] = ()
    """What its output must have."""
    code: int = 0
    config: str = QUICKSTART
    script: str = "launch/ppo.py"
    bug: Bug | None = None
    """A real bug that is put back, with its own words."""
    then: "RunCase | None" = None
    """The next run, in the same run directory."""
    marks: Sequence[Any] = field(default=(pytest.mark.long,))


def write_rows(folder: Path, rows: int = 64) -> None:
    """Rows as verl's examples have them, with a ground truth of one digit, which random text hits at times."""
    (folder / "rows").mkdir()
    with (folder / "rows" / "train.jsonl").open("w") as file:
        for index in range(rows):
            asked = {"role": "user", "content": f"What is {index % 10}?"}
            row = {"prompt": [asked], "data_source": "lighteval/MATH", "extra_info": {"index": index}}
            file.write(json.dumps(row | {"reward_model": {"style": "rule", "ground_truth": str(index % 10)}}) + "\n")
    (folder / "my_reward.py").write_text(REWARD)


def as_the_quickstart(ran: Ran) -> None:
    """Nothing that is measured differs, whatever else is done."""
    assert [row for row in values(ran.job) if row["kind"] != "validation"] == ran.plain()


def as_the_quickstart_without_verification(ran: Ran) -> None:
    """The rehearsal of the quickstart has changed its weights back to the last bit."""
    assert values(ran.job) == [{name: row[name] for name in row if "sync_tensors" not in name} for row in ran.plain()]


def validated(ran: Ran) -> None:
    rows = [row for row in ran.job.metrics() if row["kind"] == "validation"]
    assert [row["validation/step"] for row in rows] == [0, 2, 3]
    assert all(row["validation/rows"] == 5 and 0 <= row["validation/accuracy"] <= 1 for row in rows)
    assert "<h2>Validation</h2>" in (ran.job.folder / "report.html").read_text()


def warmed_up_and_scheduled(ran: Ran) -> None:
    steps = ran.steps()
    assert [any(name.startswith("actor/") for name in step) for step in steps] == [False, True, True]
    assert all(step["critic/grad_norm"] > 0 for step in steps)
    rates = [step["actor/learning_rate"] for step in steps[1:]]
    assert 2e-2 > rates[0] > rates[1] >= 0, "linear: down to 0 at the end of the run"
    assert bool(TRACKERS) == bool(list(ran.job.folder.glob("tensorboard/events.*")))


def repeats_the_updates(ran: Ran) -> None:
    """The learner alone, from what the run before has saved."""
    assert ran.before and not (ran.job.folder / "engines").exists()
    rows, repeated = values(ran.before), values(ran.job)
    assert [{name: row[name] for name in again} for row, again in zip(rows, repeated, strict=False)] == repeated
    assert len(repeated) == 3 and all(row["critic/grad_norm"] > 0 for row in repeated)


def is_one_sentence(ran: Ran) -> None:
    ran.job.mistake()


def heeded_stops_and_learned_nothing(ran: Ran) -> None:
    assert len(list((ran.folder / "saved").iterdir())) == 4
    steps = ran.steps()
    assert all("actor/loss" not in step and 0 <= step["reward_mean"] <= 1 for step in steps) and len(steps) == 2
    assert all(step["truncated_share"] < 1 for step in steps), "some response has an e"
    assert [row["validation/step"] for row in ran.job.metrics() if row["kind"] == "validation"] == [0, 2]


def scaled_its_loss(ran: Ran) -> None:
    steps = ran.steps()
    assert all(1e-5 < step["log_prob_difference_mean"] < 0.05 for step in steps), "it computes in float16"
    for role in ("actor", "critic"):
        assert all(step[f"{role}/loss_scale"] > 1 and step[f"{role}/grad_norm"] > 0 for step in steps)


def has_the_users_reward_and_no_critic(ran: Ran) -> None:
    steps = ran.steps()
    assert all(step["reward_mean"] > 100 and step["actor/grad_norm"] > 0 for step in steps), steps
    assert not any(name.startswith("critic/") for step in steps for name in step)


def agrees_in(tolerance: float) -> Callable[[Ran], None]:
    def check(ran: Ran) -> None:
        differences = [step["log_prob_difference_mean"] for step in ran.steps()]
        assert all(0 < difference < tolerance for difference in differences), differences

    return check


def no_replay_moved_a_log_prob(ran: Ran) -> None:
    assert all(step["routing/log_probs_moved_by_replay"] < 1e-5 for step in ran.steps())


UNREAD = {
    **{"critic.learning_rate": "0.1", "algorithm.gamma": "0.5", "algorithm.lam": "0.5"},
    **{"algorithm.kl_coefficient": "1", "actor.microbatch_size": "1"},
    **{"parallel.rank_order": "dp,pp,tp", "weights.folder": "{folder}/weights", "validation.rows": "1"},
    **{"checkpoint.keep": "1", "checkpoint.folder": "{folder}/kept", "trackers.experiment": "x"},
}
"""Keys that have no effect in a run of GRPO whose microbatches are by tokens."""


def as_the_run_before(ran: Ran) -> None:
    """What is said to have no effect has none."""
    said = "\n".join(line for line in ran.job.output().splitlines() if " no effect: " in line)
    assert [key for key in UNREAD if f"{key} = " not in said] == []
    assert ran.before and values(ran.job) == values(ran.before)
    assert not (ran.folder / "weights").exists() and not (ran.folder / "kept").exists()


def no_step_was_made(ran: Ran) -> None:
    assert not any(event.get("phase") == "generate" for event in ran.job.events())
    (line,) = {each for each in ran.job.output().splitlines() if "rank 0 FAILED" in each}
    assert line.count("model.") == 1


def one_step_was_made(ran: Ran) -> None:
    assert len(ran.job.metrics()) == 1


def is_stale(when: str) -> str:
    return f"WeightsDidNotArrive: {when}: after the sync the engine holds other weights: "


GRPO_BY_TOKENS = (
    "--algorithm.advantage grpo --algorithm.kl_placement none --run.steps 2 --actor.tokens_per_microbatch 512"
    " --task.max_prompt_tokens 128"
)
PACKED = (
    "--parallel.dp 2 --parallel.tp 1 --task.max_prompt_tokens 128 --algorithm.critic_warmup 1 --actor.schedule linear"
    " --model.packed true --actor.tokens_per_microbatch 256"
)
RUNS = {
    "a pull, offloaded parameters, validation and saving change nothing": RunCase(
        "--weights.transport pull --memory.offload_parameters actor --rollout.save {folder}/saved"
        " --validation.source arithmetic --validation.rows 5 --validation.before_train true --validation.every 2",
        (as_the_quickstart, validated),
        says=("validation after 3 updates, 5 rows: accuracy",),
    ),
    "the rehearsal changes nothing": RunCase("--weights.verify false", (as_the_quickstart_without_verification,)),
    "a warm-up, a schedule and packed batches on two engines": RunCase(
        f"{PACKED} {TRACKERS} --rollout.save {{folder}}/saved",
        (warmed_up_and_scheduled,),
        then=RunCase(
            f"{PACKED} --rollout.load {{folder}}/saved",
            (repeats_the_updates,),
            then=RunCase(
                f"{PACKED} --rollout.load {{folder}}/saved --rollout.temperature 0.7",
                (is_one_sentence,),
                says=("with rollout.temperature = 1.0, but this run has 0.7",),
                code=2,
            ),
        ),
    ),
    "the engine alone": RunCase(
        "--rollout.only --run.steps 2 --rollout.stop '[\"e\"]' --rollout.save {folder}/saved"
        " --task.source {folder}/rows --task.max_prompt_tokens 128 --validation.source arithmetic"
        " --validation.before_train true" + (" --task.reward math" if importlib.util.find_spec("math_verify") else ""),
        (heeded_stops_and_learned_nothing,),
        says=("2 steps of the engine without a trainer",),
    ),
    "float16": RunCase("--model.name qwen3_moe --model.dtype float16 --weights.transport bucket", (scaled_its_loss,)),
    "bfloat16, two engines, RLOO, named tensors and a reward of the user": RunCase(
        "--model.name deepseek_v3 --model.dtype bfloat16 --parallel.dp 2 --parallel.tp 1 --run.steps 2"
        " --weights.transport tensor --algorithm.advantage rloo --algorithm.kl_placement loss"
        " --task.source {folder}/rows --task.max_prompt_tokens 128 --task.reward {folder}/my_reward.py:score",
        (agrees_in(0.05), has_the_users_reward_and_no_critic),
    ),
    "DP attention and expert parallelism": RunCase(
        f"--model.name deepseek_v3 --weights.transport bucket {shlex.join(DP_AND_EP)}", (agrees_in(1e-5),)
    ),
    "a replay of experts that agree": RunCase(
        "--model.name deepseek_v3 --algorithm.advantage grpo --run.steps 2 --actor.learning_rate 1e-5"
        " --rollout.routing replay",
        (agrees_in(1e-5), no_replay_moved_a_log_prob),
    ),
    "what has no effect": RunCase(
        GRPO_BY_TOKENS,
        then=RunCase(
            f"{GRPO_BY_TOKENS} {' '.join(f'--{key} {value}' for key, value in UNREAD.items())}", (as_the_run_before,)
        ),
    ),
    "random weights in block FP8 have no baseline": RunCase(
        "--model.weights random --run.steps 2",
        config="configs/cpu/fp8_block.toml",
        says=("not measured on a load of its own",),
    ),
    "a copy that nothing computes with is noted and no failure": RunCase(
        script="tests/end_to_end/ppo_with_early_copy.py",
        says=(
            "agree, so nothing computes with it",
            "model.layers.0.self_attn.qkv_proj.kept_weight, a copy",
        ),
    ),
    # At this learning rate no update moves a log-prob by more than is allowed, whatever the layer computes with.
    "the rehearsal shows a copy of old weights that nothing leads to": RunCase(
        "--actor.learning_rate 1e-7",
        script="tests/end_to_end/ppo_with_hidden_copy.py",
        code=1,
        says=("WeightsDidNotArrive: in the rehearsal: with changed weights", "(stale-copy-of-weights)"),
    ),
    "a tensor that is not sent is named before anything is generated with it": RunCase(
        script="tests/end_to_end/ppo_without_one_tensor.py",
        code=1,
        checks=(no_step_was_made,),
        says=(
            is_stale("in the rehearsal")
            + "model.layers.1.mlp.up_proj.weight: never written: 4096 of 4096 elements on rank 0",
        ),
    ),
    # With GRPO and rewards that are all equal, the engine holds the right weights already.
    "a sync that does nothing is caught where no weight moves": RunCase(
        bug=nothing_sent, code=1, says=(is_stale("step 1"),), marks=(pytest.mark.slow,)
    ),
    "pulls that do nothing are caught while only the critic learns": RunCase(
        "--algorithm.advantage gae --algorithm.critic_warmup 3 --weights.transport pull",
        bug=nothing_sent,
        code=1,
        says=(is_stale("step 1"),),
    ),
    "a server behind HTTP": RunCase(
        config="tests.rollout.http_engine:HttpEngine",
        words=f"{QUICKSTART} --engine.device cpu --weights.transport bucket",
        script="tests/rollout/ppo_with.py",
        checks=(agrees_in(1e-5),),
        says=(
            "PASSED: 3 PPO steps",
            "fingerprints were not possible, as this engine cannot be asked",
            "do not show a failed sync",
        ),
    ),
    "responses of old weights": RunCase(
        config="tests.rollout.engine_of_old_weights:EngineOfOldWeights",
        words=QUICKSTART,
        script="tests/rollout/ppo_with.py",
        code=1,
        checks=(one_step_was_made,),
        says=("of version 0, but this step's sync brought version 1: the weights are stale",),
    ),
}
"""Long unless marked otherwise. What has never sent anything is D4 of tests/real_bugs, which the nightly job runs."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=case.marks) for name, case in RUNS.items()])
def test_a_run(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    write_rows(tmp_path)
    case: RunCase | None = RUNS[name]
    before: Job | None = None
    for number in count():
        if not case:
            return
        start = case.bug.words() if case.bug else [case.config]
        words = [*start, *shlex.split(case.words.format(folder=tmp_path))]
        environment = case.bug.environment(tmp_path / "acted") if case.bug else {}
        job = run(tmp_path / f"run{number}", 2, *words, script=case.script, environment=environment)
        assert job.process.returncode == case.code, job.output()[-6000:]
        assert [said for said in case.says if said not in job.output()] == [], job.output()[-6000:]
        assert ("PASSED" in job.output()) == (case.code == 0)
        assert job.left_behind() == []
        for check in case.checks:
            check(Ran(job, tmp_path, lambda: values(request.getfixturevalue("quickstart")), before))
        case, before = case.then, job
