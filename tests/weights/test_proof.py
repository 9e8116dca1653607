from pathlib import Path

import pytest

from harness.weights.proof import section, verdict
from tests.weights.test_verify import Level, difference, verification

ROLLOUTS = [
    difference(mean).metrics() | {"verify/poison_seconds": 0.5, "verify/readback_seconds": 2 * mean}
    for mean in (1e-6, 3e-6, 2e-6)
]


@pytest.mark.parametrize(
    ("level", "phrase"),
    [
        ("off", '3 weight syncs, not verified (weights.verify = "off"): largest mean log-prob difference 3.0e-06'),
        (
            "log_probs",
            "3 weight syncs, each proven by the engine's log-probs: largest mean difference 3.0e-06, allowed 1e-05",
        ),
        (
            "bytes",
            "3 weight syncs, each read back bit for bit and proven by the engine's log-probs: largest mean difference"
            " 3.0e-06, allowed 1e-05",
        ),
    ],
)
def test_the_verdict_claims_what_the_level_checked(level: Level, phrase: str, tmp_path: Path) -> None:
    assert verdict(verification(tmp_path, level), ROLLOUTS) == phrase


def test_the_section_has_level_statistics_and_costs(tmp_path: Path) -> None:
    checks = verification(tmp_path, "bytes")
    checks.set_baseline(difference(4e-6))
    lines = section(checks, ROLLOUTS, {"sync": [0.25, 0.75]})
    assert lines[0].startswith('weights.verify = "bytes". After every sync all that the engine holds was read back')
    assert "| mean | 4e-06 | 3e-06 | 1.2e-05 |" in lines
    assert "| sync | 2 | 0.500 | 0.750 |" in lines
    assert "| poison | 3 | 0.500 | 0.500 |" in lines
    assert "| readback | 3 | 0.000 | 0.000 |" in lines


def test_the_section_says_why_there_is_no_baseline_and_no_bound(tmp_path: Path) -> None:
    checks = verification(tmp_path, "off")
    checks.load_baseline()
    lines = section(checks, ROLLOUTS, {})
    assert "No baseline of the log-prob difference: not wanted at level off." in lines
    assert "| mean | none | 3e-06 | any |" in lines
