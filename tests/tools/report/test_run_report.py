import json
import time
from importlib import metadata
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.cluster.mesh import ParallelDims
from harness.cluster.placement import RankLocation
from harness.cluster.world import World
from harness.config.run_folder import write_config
from harness.config.schema import Config
from harness.runtime.events import EventLog
from harness.runtime.observer import RunContext
from harness.runtime.run_record import Metrics, RunRecord, Stage, taken
from harness.runtime.units import GIB
from harness.tools.report.run_report import PassedRun, bars, curve, layers, steady, steady_sentence

STEP = {
    "reward_mean": 0.25, "truncated_share": 0.5, "log_prob_difference_mean": 2.5e-6, "actor/loss": -0.125, "actor/grad_norm": 0.5,
    "actor/entropy": 4.75, "seconds": 1.5,
}  # fmt: skip
CRITIC = {"critic/loss": 0.75, "critic/explained_variance": -0.5}


def record_in(folder: Path) -> RunRecord:
    return RunRecord(file=folder / "metrics.jsonl", launched=time.time() - 5)


def markdown(record: RunRecord, folder: Path) -> str:
    locations = tuple(RankLocation(rank=each, host="h", local_rank=each, visible=None) for each in range(2))
    world = World(rank=0, world_size=2, local_rank=0, host="h", device=torch.device("cpu"), locations=locations)
    config, events = Config(), EventLog(folder / "rank0.jsonl", 0, "h")
    dims = ParallelDims.of(config.parallel)
    run = RunContext(config=config, world=world, dims=dims, events=events, folder=folder, launched=record.launched)
    write_config(folder, config, "cpu")
    return PassedRun(run, record).markdown()


def step(index: int, **changed: float) -> Metrics:
    return {"step": float(index)} | STEP | changed


@pytest.mark.parametrize("critic", [{}, CRITIC])
def test_the_report_has_verdict_table_and_config(critic: dict[str, float], tmp_path: Path) -> None:
    record = record_in(tmp_path)
    record.add(step(0, **critic))
    record.add(step(1, **critic))
    record.finish({"log_prob_difference_mean": 3e-6})
    text = markdown(record, tmp_path)
    assert text.startswith("# PPO on sglang: qwen2, dp 1 tp 2 pp 1\n\nPASSED, 2 steps, 2 ranks on 1 host(s), cpu.\n")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 4 and len({row.count("|") for row in rows}) == 1
    assert ("critic/loss" in rows[0]) == bool(critic)
    assert rows[3].startswith("| 1 | 0.25 | 2.5e-06 | -0.125 | 0.5 | 4.75 |")
    assert f"- torch {metadata.version('torch')}" in text
    assert "[parallel]" in text and "tp = 2" in text


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


def test_the_report_shows_memory_and_whether_it_grows(tmp_path: Path) -> None:
    record = record_in(tmp_path)
    for index, used in enumerate((3, 5, 10, 10, 11)):
        gpu = {"rss": 1, "used": used, "reserved": used, "peak": used + 2, "before": used, "engine": 0}
        ranks = tuple(gpu | {"free": 100 - used, "total": 100} for _ in range(2))
        record.add(step(index), [Stage(phase="sync", step=index, ranks=ranks)])
    record.finish({"log_prob_difference_mean": 3e-6})
    text = markdown(record, tmp_path)
    assert "\n## Memory\n" in text and "sync |uuuuuuu" in text
    assert "Memory after a step is NOT steady" in text and "(+10.00%;" in text
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [each["memory/end"] for each in metrics[:5]] == [3, 5, 10, 10, 11]


def test_the_report_says_which_rank_ran_where(tmp_path: Path) -> None:
    record = record_in(tmp_path)
    record.add(step(0))
    record.finish(step(1))
    text = markdown(record, tmp_path)
    assert "Where it ran" in text
    assert "  h  rank 0 dp0 tp0 pp0 | rank 1 dp0 tp1 pp0\n    engine 0 node 0 on h: ranks 0, 1, builder rank 0" in text


def on_gpu(used: int, engine: int, peak: int = 0) -> dict[str, int]:
    """A GPU of 100 GiB; all in GiB."""
    figures = {"rss": 2, "used": used, "reserved": used + 5, "peak": peak, "before": 3, "engine": engine}
    return {name: size * GIB for name, size in (figures | {"free": 95 - used - engine, "total": 100}).items()}


STAGES = [
    Stage(phase="resume_weights", step=2, ranks=(on_gpu(10, 20), on_gpu(11, 20))),
    Stage(phase="sync", step=2, ranks=(on_gpu(10, 20, peak=14), on_gpu(12, 20, peak=13))),
    Stage(phase="release", step=2, ranks=(on_gpu(4, 1), on_gpu(5, 2))),
]
ON_CPU = [Stage(phase="sync", step=0, ranks=({"rss": 3 * GIB}, {"rss": 2 * GIB}))]


def test_layers_add_up_to_the_gpu() -> None:
    for stage in STAGES:
        for rank in stage.ranks:
            assert sum(layers(rank).values()) == rank["total"]
            assert taken(rank) == sum(layers(rank).values()) - layers(rank)["free"]


@pytest.mark.parametrize(
    ("values", "is_steady"),
    [
        ([5, 7, 100, 101, 99], True),
        ([100, 100, 100, 100, 101.5], False),
        ([100, 100, 100, 98.5, 100], False),
        ([0, 0, 100, 102, 100], False),
    ],
)
def test_steady_compares_with_the_third_step(values: list[float], is_steady: bool) -> None:
    assert steady(values) is is_steady


def test_steady_needs_something_to_compare() -> None:
    with pytest.raises(ValueError, match=r"3 values: steady\(after=3\) needs more than 3"):
        steady([1, 1, 1])


@given(base=st.floats(1, 1e12), changes=st.lists(st.floats(-0.0099, 0.0099), min_size=4, max_size=20))
def test_steady_within_the_share(base: float, changes: list[float]) -> None:
    values = [base, base, base, *(base * (1 + change) for change in changes)]
    assert steady(values)
    assert not steady([*values, base * 1.011])


def test_the_sentence_on_leaks() -> None:
    assert steady_sentence([GIB] * 3) is None
    assert steady_sentence([GIB] * 4) == (
        "Memory after a step is steady: 1.000 GiB after step 4, 1.000 GiB after step 3 (+0.00%; allowed at every step"
        " between: 1%)."
    )
    assert "NOT steady: 2.000 GiB after step 4" in (steady_sentence([GIB, GIB, GIB, 2 * GIB]) or "")


def test_bars_show_the_worst_rank_of_each_phase() -> None:
    rows = bars(STAGES, width=100)
    assert rows[1] == f"sync           |{'u' * 12}{'r' * 5}{'e' * 20}{'.' * 63}|   37.00 GiB"
    assert rows[-1].strip() == "u used  r reserved  e engine  . free; full width 100.00 GiB"
    assert bars([]) == []
    assert bars(ON_CPU, width=10)[0] == "sync |##########|    3.00 GiB"
