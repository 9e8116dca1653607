import json
import math
from pathlib import Path

import pytest

from harness.tools.bisection import classify
from harness.tools.bisection.question import Options

ABOVE, WORSE = Options(metric="x", above=0.01), Options(metric="x", worse="1.3x")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("x = 0.5", [0.5]),
        ("step 3  x: 1e-7, y = 4", [1e-7]),
        ('{"x": -2, "xx": 9}', [-2.0]),
        ("max_x = 3 and x/y = 2 and x.y 4", []),
        ("x = nan", [math.nan]),
        ("X 7", [7.0]),
    ],
)
def test_numbers_of_a_log(tmp_path: Path, line: str, found: list[float]) -> None:
    (tmp_path / "log.txt").write_text(line + "\n")
    assert classify.read_values("x", tmp_path / "log.txt", tmp_path) == pytest.approx(found, nan_ok=True)


def test_metrics_of_a_run_come_first_under_either_name(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("logprob_diff = 5\n")
    (tmp_path / "run").mkdir()
    lines = [json.dumps({"log_prob_difference_mean": 0.1}), json.dumps({"log_prob_difference_mean": 0.3}), '{"cut o']
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines))
    assert classify.read_values("logprob_diff", tmp_path / "log.txt", tmp_path) == [0.1, 0.3]


def test_the_worst_counts_and_nan_is_bad() -> None:
    assert classify.compared_value(ABOVE, [0.1, 0.3, 0.2]) == 0.3
    assert classify.compared_value(WORSE, [9.0, 1.0, 1.1]) == 1.1
    assert math.isnan(classify.compared_value(ABOVE, [0.1, math.nan]) or 0.0)
    assert classify.is_bad(ABOVE, math.nan, 0.01) and not classify.is_bad(ABOVE, 0.01, 0.01)
    assert classify.limit_of(WORSE, 1.3, 2.0) == 2.6 and classify.limit_of(WORSE, 1.3, None) is None
    assert classify.is_bad(WORSE, 2.61, 2.6) and not classify.is_bad(WORSE, 2.59, 2.6)
