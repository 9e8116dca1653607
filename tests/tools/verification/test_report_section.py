from pathlib import Path

from harness.tools.verification.report_section import report_section
from tests.tools.verification.test_verification_summary import ROLLOUTS, SMALL_UPDATES
from tests.weights.test_verify import difference, verification


def test_the_section_says_what_is_known_of_the_syncs(tmp_path: Path) -> None:
    report = "\n".join(report_section(verification(tmp_path), SMALL_UPDATES, {}))
    assert "- the engine's log-probs prove 1 of 3" in report and "- after each, all 27 tensors" in report


def test_the_section_has_level_statistics_and_costs(tmp_path: Path) -> None:
    checks = verification(tmp_path, "bytes")
    checks.set_baseline(difference(4e-6))
    lines = report_section(checks, ROLLOUTS, {"sync": [0.25, 0.75], "verify_baseline": [2.0]})
    assert lines[0].startswith('weights.verify = "bytes". After every sync all that the engine holds was read back')
    assert "| mean | 4e-06 | 3e-06 | 1.2e-05 |" in lines
    assert "| sync | 2 | 0.500 | 0.750 |" in lines
    assert "| baseline | 1 | 2.000 | 2.000 |" in lines
    assert "| sentinel | 3 | 0.500 | 0.500 |" in lines
    assert "| readback | 3 | 0.000 | 0.000 |" in lines


def test_the_section_says_why_there_is_no_baseline_and_no_bound(tmp_path: Path) -> None:
    checks = verification(tmp_path, "off")
    checks.load_baseline()
    lines = report_section(checks, ROLLOUTS, {})
    assert "No baseline of the log-prob difference: not wanted at level off." in lines
    assert "| mean | none | 3e-06 | any |" in lines
