"""The main job, whole: torchrun, real SGLang in CPU mode, FSDP2, and what it leaves behind."""

import json
from importlib.metadata import version

import pytest

from tests.end_to_end.launching import QUICKSTART, Job, run
from tests.tools.report.test_trace import check_trace

pytestmark = pytest.mark.slow

VOLATILE = ("seconds", "tokens_per_second/", "startup/", "memory/")


def values(job: Job) -> list[dict[str, float]]:
    """Metrics without times."""
    return [
        {name: value for name, value in step.items() if not name.removeprefix("final/").startswith(VOLATILE)}
        for step in job.metrics()
    ]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run(tmp_path_factory.mktemp("a") / "run", 2, QUICKSTART)


def test_three_steps_pass_and_every_sync_is_proven(quickstart: Job) -> None:
    assert quickstart.process.returncode == 0, quickstart.output()
    steps = quickstart.metrics()
    assert [step.get("step") for step in steps] == [0, 1, 2, None]
    differences = [step["log_prob_difference_mean"] for step in steps[:3]] + [
        steps[3]["final/log_prob_difference_mean"]
    ]
    assert all(0 < difference < 1e-5 for difference in differences), differences
    assert [step["weight_version"] for step in steps[:3]] == [0, 1, 2] and steps[3]["final/weight_version"] == 3
    assert all(step["actor/grad_norm"] > 0 and step["critic/grad_norm"] > 0 for step in steps[:3])
    assert steps[3]["final/sync_tensors_compared"] == steps[3]["final/sync_tensors"] == 27
    (verdict,) = [
        line for line in quickstart.output().splitlines() if "PASSED: 3 PPO steps; 4 weight syncs onto poison: " in line
    ]
    assert "all 27 tensors in the engine equal the trainer's by fingerprint" in verdict
    assert verdict.endswith("; engine preset reproducible")
    (engine,) = [each for each in quickstart.events() if each["event"] == "engine"]
    assert engine["preset"] == "reproducible"
    assert all(0.5 < step["truncated_share"] <= 1 for step in steps[:3]), "random weights seldom draw the end token"
    assert "unchanged weights: the log-probs of engine and trainer differ by" in quickstart.output()


def test_each_row_has_the_seconds_of_every_phase_throughput_memory_and_lengths(quickstart: Job) -> None:
    rows = quickstart.metrics()
    assert [row["kind"] for row in rows] == ["step", "step", "step", "final_check"]
    for step, row in enumerate(rows):
        prefix = "final/" if step == 3 else ""
        ended = [each for each in quickstart.events() if each["event"] == "phase_end" and each["step"] == step]
        timed = {name.removeprefix(f"{prefix}seconds/") for name in row if name.startswith(f"{prefix}seconds/")}
        assert timed == {each["phase"] for each in ended} and "generate" in timed
        assert row[f"{prefix}memory/max_rss"] > 100e6
        shortest, mean, longest = (row[f"{prefix}response_tokens_{each}"] for each in ("min", "mean", "max"))
        assert 1 <= shortest <= mean <= longest <= 8 and row[f"{prefix}response_tokens"] == mean * 64
        if step < 3:
            assert {"free_caches", "update_actor", "update_critic"} <= timed
            assert row["tokens_per_second/step"] == row["tokens"] / row["seconds"]
            assert row["tokens_per_second/generate"] <= row["response_tokens"] / row["seconds/generate"]
            assert row["tokens_per_second/update_actor"] > 0 and row["tokens_per_second/update_critic"] > 0


def test_the_trace_has_all_phases_of_both_ranks_and_the_engines_calls_inside_them(quickstart: Job) -> None:
    events = check_trace(quickstart.folder / "trace.json")
    for rank in range(2):
        ended = [each for each in quickstart.events(rank) if each["event"] == "phase_end" and each["phase"] != "run"]
        phases = [each for each in events if each["ph"] == "X" and each["cat"] == "phase" and each["pid"] == rank]
        assert sorted(each["name"] for each in phases) == sorted(each["phase"] for each in ended)
        assert any(each["ph"] == "C" and each["pid"] == rank and each["args"]["rss MiB"] > 100 for each in events)
    calls = [each for each in events if each["ph"] == "X" and each["cat"] == "engine" and each["pid"] == 0]
    for call, phase in (("generate", "generate"), ("update_weights_from_tensor", "sync")):
        phases = [each for each in events if each["ph"] == "X" and each["name"] == phase and each["cat"] == "phase"]
        spans = [(each["ts"], each["ts"] + each["dur"]) for each in phases if each["pid"] == 0]
        assert len(spans) == 4
        mine = [each for each in calls if each["name"] == call]
        inside = [any(start <= each["ts"] <= each["ts"] + each["dur"] <= end for start, end in spans) for each in mine]
        assert sum(inside) >= 4 and all(each["args"]["ok"] for each in mine)


def test_it_leaves_no_process_and_a_report(quickstart: Job) -> None:
    assert quickstart.left_behind() == []
    report = (quickstart.folder / "report.md").read_text()
    assert "| 2 | " in report and "preset: reproducible" in report and "| changed_log_probs | 1 |" in report
    assert "preset: reproducible" in (quickstart.folder / "report.html").read_text()
    assert (quickstart.folder / "config.toml").is_file()
    ranks = json.loads((quickstart.folder / "environment.json").read_text())
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert all(rank["versions"]["sglang"] == version("sglang") for rank in ranks)
    assert (quickstart.folder / "engines" / "engine-rank0.log").is_file()


def test_the_console_says_where_the_start_went(quickstart: Job) -> None:
    startup = quickstart.metrics()[0]
    assert {"startup/launch_and_import", "startup/sglang_import", "startup/engine", "startup/models"} <= set(startup)
    assert startup["startup/first_token"] > startup["startup/engine"]
    assert "first token" in quickstart.output()


def test_a_response_is_shown_on_the_console_and_in_the_report(quickstart: Job) -> None:
    [last] = [each for each in quickstart.events() if each["event"] == "sample" and each["step"] == 3]
    [line] = [line for line in quickstart.output().splitlines() if "] a response: " in line]
    assert repr(last["prompt"][:40]) in line and line.endswith(f"reward {last['reward']:.3f}")
    report = (quickstart.folder / "report.md").read_text()
    assert all(f"step {step}, reward " in report for step in range(4)) and repr(last["prompt"]) in report


def test_only_rank_0_speaks(quickstart: Job) -> None:
    lines = [line for line in quickstart.output().splitlines() if line.startswith("[") and " s] " in line]
    assert len(lines) == len(set(lines))
    assert sum("engine up" in line for line in lines) == 1
