"""Results as files, and in the catalogue."""

import shutil
from pathlib import Path

from harness.tools.diagnose.entries import FOLDER, read_entry
from harness.tools.repro.case_result import CaseResult, as_seen, read_result, record, write_result
from harness.tools.repro.case_verdict import EXIT_CODES, VariantOutcome, VerdictKind

SLUG = "rollout-timeout"
ODD = 'it said "timed out" \\ and\ttab, \u00b5'


def a_result(kind: VerdictKind, sentence: str) -> CaseResult:
    outcome = VariantOutcome(exit_code=1, output="a\nb", seconds=2.5)
    facts = {"device": "2-core CPU", "versions": {"torch": "2.13.0+cpu"}, "variants": {"broken": outcome}}
    return CaseResult(slug=SLUG, verdict=kind, exit_code=EXIT_CODES[kind], sentence=sentence, **facts)  # type: ignore[arg-type]


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    result = a_result("reproduced", ODD)
    write_result(tmp_path / "new", result)
    assert read_result(tmp_path / "new" / f"{SLUG}.json") == result


def test_it_is_recorded_once_and_the_entry_stays_as_it_was_otherwise(tmp_path: Path) -> None:
    shutil.copy(FOLDER / f"{SLUG}.toml", tmp_path)
    before = read_entry(tmp_path / f"{SLUG}.toml")
    seen = as_seen(a_result("reproduced", ODD), "2026-11-21")
    assert seen and seen.result == f"launch/repro.py run {SLUG}: reproduced: {ODD}"
    assert record(SLUG, seen, tmp_path)
    assert not record(SLUG, seen, tmp_path)
    after = read_entry(tmp_path / f"{SLUG}.toml")
    assert after.seen == (*before.seen, seen)
    assert (after.examples, after.repro, after.cause) == (before.examples, before.repro, before.cause)


def test_what_shows_nothing_is_not_recorded() -> None:
    assert as_seen(a_result("cannot run here", "no GPU."), "2026-11-21") is None
    assert as_seen(a_result("proves nothing", "it failed."), "2026-11-21") is None
    assert as_seen(a_result("the control passed", "exit code 0."), "2026-11-21") is None
