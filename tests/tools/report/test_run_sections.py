"""The sections of a passed run's report.md."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.runtime.run_record import Metrics, Stage, stage_metrics
from harness.runtime.units import GIB
from harness.tools.report.run_sections import bars, curve, run_sections, steady, steady_sentence
from harness.tools.report.svg import stack, taken

STEP = {
    "reward_mean": 0.25, "truncated_share": 0.5, "log_prob_difference_mean": 2.5e-6, "actor/loss": -0.125, "actor/grad_norm": 0.5,
    "actor/entropy": 4.75, "seconds": 1.5,
}  # fmt: skip
CRITIC = {"critic/loss": 0.75, "critic/explained_variance": -0.5}
FINAL = {"kind": "final_check", "final/step": 2, "final/log_prob_difference_mean": 3e-6}
EVENTS = [{"event": "verification", "lines": ["every tensor"]}]


def step(index: int, **more: float) -> Metrics:
    return {"step": float(index)} | STEP | more


@pytest.mark.parametrize("critic", [{}, CRITIC])
def test_a_passed_run_has_a_table_of_its_steps(critic: dict[str, float]) -> None:
    first = step(0, **critic) | {"startup/engine": 2.25}
    lines = run_sections([first, step(1, **critic), FINAL], EVENTS)
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 4 and len({row.count("|") for row in rows}) == 1
    assert ("critic/loss" in rows[0]) == bool(critic)
    assert rows[3].startswith("| 1 | 0.25 | 2.5e-06 | -0.125 | 0.5 | 4.75 |")
    assert "every tensor" in lines and "- engine: 2.2 s" in lines and "## Memory" not in lines


def test_a_job_without_steps_and_a_run_without_an_end_have_none() -> None:
    assert run_sections([], []) == run_sections([step(0)], EVENTS) == []


def test_memory_is_shown_with_whether_it_grows() -> None:
    metrics = []
    for index, used in enumerate((3, 5, 10, 10, 11)):
        gpu = {"rss": 1, "used": used, "reserved": used, "peak": used + 2, "before": used, "engine": 0}
        gpu = {name: size * GIB for name, size in (gpu | {"free": 100 - used, "total": 100}).items()}
        metrics.append(step(index) | stage_metrics([Stage(phase="sync", step=index, ranks=(gpu, gpu))]))
    text = "\n".join(run_sections([*metrics, FINAL], EVENTS))
    assert "\n## Memory\n" in text and "sync |uuuuuuu" in text and "Peak extra memory of a sync: 2048 MiB" in text
    assert "Memory after a step is NOT steady" in text and "(+10.00%;" in text


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


def on_gpu(used: int, engine: int) -> dict[str, int]:
    return {"used": used, "reserved": used + 5, "engine": engine, "free": 95 - used - engine}


def test_a_stack_adds_up_to_the_gpu() -> None:
    column = stack(on_gpu(10, 20))
    assert sum(column.values()) == 100 and taken(column) == 35
    assert stack({"rss": 7}) == {"rss": 7}


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
    ranks = [on_gpu(10, 20), on_gpu(12, 20)]
    phases = {
        phase: {name: [rank[name] * 1024 for rank in ranks] for name in ranks[0]}
        for phase in ("resume_weights", "sync")
    }
    rows = bars(phases, width=100)
    assert rows[1] == f"sync           |{'u' * 12}{'r' * 5}{'e' * 20}{'.' * 63}|   37.00 GiB"
    assert rows[-1].strip() == "u used  r reserved  e engine  . free; full width 100.00 GiB"
    assert bars({"sync": {"rss": [3072, 2048]}}, width=10)[0] == "sync |##########|    3.00 GiB"
