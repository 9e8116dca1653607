from collections.abc import Sequence
from typing import Any

import pytest

from harness.config.schema import Model
from harness.weights.log_probs import Allowed
from harness.weights.verification.summary import Metrics, mismatch_of_precisions, report_section, verdict_phrase
from tests.weights.verification.test_verification import difference

ROLLOUTS: list[dict[str, float]] = [
    difference(mean).metrics()
    | {"seconds/sync": 9.0, "seconds/verify_poison": 0.5, "seconds/verify_readback": 2 * mean}
    | {"sync_tensors": 27, "sync_tensors_compared": 27}
    for mean in (1e-6, 3e-6, 2e-6)
]
ALLOWED = Allowed.of(None)
FP8 = Model(dtype="bfloat16", rollout_precision="fp8_block").precision


def phrase(level: str, rollouts: Sequence[Metrics] = ROLLOUTS, asked: str = "", can_ask: bool = True) -> str:
    return verdict_phrase(level, asked or level, can_ask, rollouts, ALLOWED)


def section(level: str, rollouts: Sequence[Metrics] = ROLLOUTS, **changes: Any) -> list[str]:
    given: dict[str, Any] = {
        "asked": level,
        "can_ask": True,
        "baseline": None,
        "why_no_baseline": "",
        "allowed": ALLOWED,
    }
    return report_section(level=level, rollouts=rollouts, **(given | {"is_exact": True, "seconds": {}} | changes))


def test_off_claims_nothing() -> None:
    said = '3 weight syncs, not verified (weights.verify = "off"): largest mean log-prob difference 3.0e-06'
    assert phrase("off") == said


@pytest.mark.parametrize(("level", "done"), [("log_probs", False), ("bytes", True), ("full", True)])
def test_the_verdict_claims_what_the_level_checked(level: str, done: bool) -> None:
    said = phrase(level)
    assert said.startswith("3 weight syncs onto poison: ")
    assert "after each, and again after its rollout, all 27 tensors in the engine equal the trainer's" in said
    assert ("read back bit for bit" in said) == done
    assert (
        "largest mean log-prob difference 3.0e-06, allowed 1e-05; log-probs do not show an update that moves them less"
        in said
    )


def test_in_half_precision_verdict_and_report_say_what_the_trainer_itself_rounds_away() -> None:
    allowed = Allowed.of(difference(7e-3))
    said = verdict_phrase("log_probs", "log_probs", True, ROLLOUTS, allowed)
    assert "allowed 0.014 (the trainer's own rounding is 7.0e-03)" in said
    assert any("are 7.0e-03 from its own in float32" in line for line in section("log_probs", allowed=allowed))


def test_the_mismatch_of_precisions_stands_beside_that_of_the_first_load() -> None:
    assert mismatch_of_precisions(Model(dtype="bfloat16").precision, ROLLOUTS, None) == ""
    said = mismatch_of_precisions(FP8, ROLLOUTS, difference(2e-6), True)
    assert said.startswith(
        "the last sync equals a reload of the saved fp8_block weights, greedy log-probs equal bit for bit"
    )
    assert (
        "the fp8_block engine and the bfloat16 trainer differ by up to 3.0e-06 in the mean (2.0e-06 on its own" in said
    )
    verdict = verdict_phrase("bytes", "bytes", True, ROLLOUTS, ALLOWED, (), said)
    assert f"; {said}, allowed 1e-05" in verdict and "largest mean log-prob" not in verdict
    assert "bytes show arrival" in "\n".join(section("bytes", mismatch=said))
    unmeasured = mismatch_of_precisions(FP8, ROLLOUTS, None)
    assert "reload" not in unmeasured and "not measured on a load of its own" in unmeasured


def test_tensors_that_cannot_be_followed_are_counted() -> None:
    some = [each | {"sync_tensors_compared": 25} for each in ROLLOUTS]
    assert "25 of 27 tensors in the engine equal" in phrase("log_probs", some)


@pytest.mark.parametrize(
    ("asked", "missing"),
    [("log_probs", "fingerprints were"), ("full", 'weights.verify = "full" and fingerprints were')],
)
def test_what_was_not_possible_is_named_in_verdict_and_report_and_not_claimed(asked: str, missing: str) -> None:
    bare = [{name: value for name, value in each.items() if "tensors" not in name} for each in ROLLOUTS]
    verdict = phrase("log_probs", bare, asked=asked, can_ask=False)
    report = "\n".join(section("log_probs", bare, asked=asked, can_ask=False))
    said = f"{missing} not possible, as this engine cannot be asked what it holds; log-probs alone do not show a failed"
    assert said in verdict and f"- {said}" in report
    assert "rehearsed" not in verdict and "by fingerprint" not in verdict and "64-bit fingerprints" not in report
    assert "poison" not in verdict


def test_the_section_has_level_statistics_and_costs() -> None:
    lines = section("bytes", baseline=difference(4e-6), seconds={"sync": [0.25, 0.75], "verify_baseline": [2.0]})
    assert lines[0].startswith('weights.verify = "bytes". ') and "read back" in lines[0]
    assert any("all 27 tensors in the engine equal the trainer's by fingerprint" in line for line in lines)
    assert "| mean | 4e-06 | 3e-06 | 1e-05 |" in lines
    assert "| sync | 2 | 0.500 | 0.750 |" in lines
    assert "| baseline | 1 | 2.000 | 2.000 |" in lines
    assert "| poison | 3 | 0.500 | 0.500 |" in lines
    assert "| readback | 3 | 0.000 | 0.000 |" in lines


def test_the_section_says_why_there_is_no_baseline_and_no_bound() -> None:
    lines = section("off", why_no_baseline="it is not wanted at level off")
    assert "No baseline of the log-prob difference, as it is not wanted at level off." in lines
    assert "| mean | none | 3e-06 | any |" in lines
