import json
import time
from importlib import metadata
from pathlib import Path

import pytest
import torch

from harness.cluster.placement import RankLocation
from harness.cluster.world import World
from harness.config.schema import Config
from harness.runtime.memory_gauge import Stage
from harness.tools.report.run_report import Metrics, Report, curve, installed_versions

STEP = {
    "reward_mean": 0.25, "truncated_share": 0.5, "log_prob_difference_mean": 2.5e-6, "actor/loss": -0.125, "actor/grad_norm": 0.5,
    "actor/entropy": 4.75, "seconds": 1.5,
}  # fmt: skip
CRITIC = {"critic/loss": 0.75, "critic/explained_variance": -0.5}


def report_of(folder: Path, rank: int = 0) -> Report:
    locations = tuple(RankLocation(rank=each, host="h", local_rank=each, visible=None) for each in range(2))
    world = World(rank=rank, world_size=2, local_rank=rank, host="h", device=torch.device("cpu"), locations=locations)
    return Report(folder=folder, config=Config(), world=world, launched=time.time() - 5)


def step(index: int, **changed: float) -> Metrics:
    return {"step": float(index)} | STEP | changed


def test_metrics_are_one_line_a_step_and_the_first_has_the_start(tmp_path: Path) -> None:
    report = report_of(tmp_path)
    with report.timed("engine"):
        time.sleep(0.02)
    report.add(step(0))
    report.add(step(1))
    report.finish({"log_prob_difference_mean": 3e-6})
    first, second, final = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert 5 <= first.pop("startup/launch_and_import") < 10 and 0.02 <= first.pop("startup/engine") < 5
    assert (first, second) == (step(0), step(1))
    assert final == {"kind": "final_check", "final/step": 2, "final/log_prob_difference_mean": 3e-6}


def test_only_rank_0_writes_metrics(tmp_path: Path) -> None:
    report = report_of(tmp_path, rank=1)
    report.add(step(0))
    assert report.steps == [step(0)] and list(tmp_path.iterdir()) == []


def test_the_verdict_says_what_is_known_of_the_syncs(tmp_path: Path) -> None:
    report = report_of(tmp_path)
    report.add(step(0))
    report.add(step(1))
    assert report.verdict("3 weight syncs, not verified") == (
        f"PASSED: 2 PPO steps; 3 weight syncs, not verified; open {tmp_path}/report.html"
    )


@pytest.mark.parametrize("critic", [{}, CRITIC])
def test_the_report_has_verdict_table_and_config(critic: dict[str, float], tmp_path: Path) -> None:
    report = report_of(tmp_path)
    report.add(step(0, **critic))
    report.add(step(1, **critic))
    report.finish({"log_prob_difference_mean": 3e-6})
    report.write()
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# PPO on sglang: qwen2, dp 1 tp 2 pp 1\n\nPASSED, 2 steps, 2 ranks on 1 host(s), cpu.\n")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 4 and len({row.count("|") for row in rows}) == 1
    assert ("critic/loss" in rows[0]) == bool(critic)
    assert rows[3].startswith("| 1 | 0.25 | 2.5e-06 | -0.125 | 0.5 | 4.75 |")
    assert f"- torch {metadata.version('torch')}" in text
    assert "[parallel]" in text and "tp = 2" in text


def test_lines_of_a_step_and_of_the_start(tmp_path: Path) -> None:
    report = report_of(tmp_path)
    report.startup |= {"launch_and_import": 1.0, "engine": 2.25, "first_token": 9.5}
    assert report.startup_line() == (
        "first token 9.5 s after launch (seconds: launch_and_import 1.0, engine 2.2; models beside engine)"
    )
    assert report.step_line(step(3)) == (
        "step 3  reward 0.250  truncated 50%  log-prob difference 2.5e-06  actor loss -0.1250  grad norm 0.500  1.5 s"
    )
    assert "explained variance -0.500" in report.step_line(step(3, **CRITIC))


def test_a_curve_of_few_values_has_one_column_each() -> None:
    rows = curve([0.0, 0.5, 1.0], height=2)
    assert rows == [" 1.00 |  #", " 0.50 | ##", "      +---", "       step 0 to 2"]


def test_a_curve_of_one_value_is_a_sentence() -> None:
    assert curve([0.0, 0.0, 0.0]) == ["0 in each step, 0 to 2"]


def test_a_curve_of_many_values_shows_the_means_of_bins() -> None:
    rows = curve([0.0, 1.0] * 50 + [1.0] * 100, height=4, width=2)
    assert [row[7:] for row in rows[:4]] == [" #", " #", "##", "##"]
    assert rows[-1].endswith("step 0 to 199")


def test_the_axis_of_a_curve_grows_with_its_values() -> None:
    rows = curve([-2.0, 2.0], height=4)
    assert [row[:8] for row in rows[:4]] == [" 2.00 | ", " 1.00 | ", " 0.00 | ", "-1.00 | "]
    assert all(row[7:] == " #" for row in rows[:4])


def test_versions_of_what_is_not_installed() -> None:
    found = installed_versions()
    assert found["torch"] == metadata.version("torch")
    assert all(version for version in found.values())


def test_the_report_shows_memory_and_whether_it_grows(tmp_path: Path) -> None:
    report = report_of(tmp_path)
    for index, used in enumerate((3, 5, 10, 10, 11)):
        gpu = {"rss": 1, "used": used, "reserved": used, "peak": used + 2, "before": used, "engine": 0}
        ranks = tuple(gpu | {"free": 100 - used, "total": 100} for _ in range(2))
        report.add(step(index), [Stage(phase="sync", step=index, ranks=ranks)])
    report.finish({"log_prob_difference_mean": 3e-6})
    report.write()
    text = (tmp_path / "report.md").read_text()
    assert "\n## Memory\n" in text and "sync |uuuuuuu" in text
    assert "Memory after a step is NOT steady" in text and "(+10.00%;" in text
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [each["memory/end"] for each in metrics[:5]] == [3, 5, 10, 10, 11]


def test_the_report_says_which_rank_ran_where(tmp_path: Path) -> None:
    report = report_of(tmp_path)
    report.add(step(0))
    report.finish(step(1))
    report.write()
    text = (tmp_path / "report.md").read_text()
    assert "Where it ran" in text
    assert "  h  rank 0 dp0 tp0 pp0 | rank 1 dp0 tp1 pp0\n    engine 0 node 0 on h: ranks 0, 1, builder rank 0" in text
