from collections.abc import Sequence
from typing import Any

import pytest

from harness.config.schema import Model
from harness.weights.log_probs import Allowed
from harness.weights.verification.summary import Metrics, mismatch_of_precisions, report_section, verdict_phrase
from tests.weights.verification.test_proof import difference

DONE = {"": 27, "_poisoned": 20, "_compared": 27, "_held": 27, "_forward": 27}
ROLLOUTS: list[dict[str, float]] = [
    difference(mean).metrics()
    | {"seconds/sync": 9.0, "seconds/verify_poison": 0.5, "seconds/verify_held": 2 * mean}
    | {f"sync_tensors{what}": count for what, count in DONE.items()}
    for mean in (1e-6, 3e-6, 2e-6)
]
ALLOWED = Allowed.of(None)
FP8 = Model(dtype="bfloat16", rollout_precision="fp8_block").precision


def phrase(rollouts: Sequence[Metrics] = ROLLOUTS, verify: bool = True, can_ask: bool = True) -> str:
    return verdict_phrase(verify, can_ask, rollouts, ALLOWED, ["SHOWN ONCE"])


def section(rollouts: Sequence[Metrics] = ROLLOUTS, **changes: Any) -> str:
    given: dict[str, Any] = {"verify": True, "can_ask": True, "rehearsed": True, "allowed": ALLOWED, "seconds": {}}
    return "\n".join(report_section(rollouts=rollouts, **given | {"baseline": None, "why_no_baseline": ""} | changes))


def without(*what: str) -> list[dict[str, float]]:
    """The rollouts, the second one of which lacks some of what was done."""
    left = {name: value for name, value in ROLLOUTS[1].items() if name not in {f"sync_tensors{each}" for each in what}}
    return [ROLLOUTS[0], left, ROLLOUTS[2]]


def test_unverified_claims_nothing() -> None:
    said = "3 weight syncs, not verified (weights.verify = false): largest mean log-prob difference 3.0e-06"
    assert phrase(verify=False) == said
    assert "| mean | none | 3e-06 | any |" in section(verify=False)


def test_the_verdict_claims_what_was_done_at_every_sync() -> None:
    said = phrase()
    assert said.startswith("3 weight syncs onto poison: SHOWN ONCE; ")
    assert "after each, and again after its rollout, all 27 tensors in the engine equal the trainer's" in said
    assert "difference 3.0e-06, allowed 1e-05; log-probs do not show an update that moves them less" in said
    assert "25 of 27 tensors in the engine equal" in phrase([each | {"sync_tensors_compared": 25} for each in ROLLOUTS])
    assert "every tensor was changed" in section() and "every tensor was changed" not in section(rehearsed=False)


@pytest.mark.parametrize(
    ("what", "in_verdict", "in_report"),
    [
        ("_poisoned", "onto poison", "the engine overwrote"),
        ("_held", "again after its rollout", "After the rollout"),
        ("_forward", "", "forward passes"),
    ],
)
def test_what_one_sync_lacks_is_not_claimed(what: str, in_verdict: str, in_report: str) -> None:
    assert in_verdict in phrase() and in_report in section()
    assert (in_verdict not in phrase(without(what)) or not in_verdict) and in_report not in section(without(what))


def test_in_half_precision_verdict_and_report_say_what_the_trainer_itself_rounds_away() -> None:
    allowed = Allowed.of(difference(7e-3))
    said = verdict_phrase(True, True, ROLLOUTS, allowed, [])
    assert "allowed 0.014 (the trainer's own rounding is 7.0e-03)" in said
    assert "are 7.0e-03 from its own in float32" in section(allowed=allowed)


def test_the_mismatch_of_precisions_stands_beside_that_of_the_first_load() -> None:
    assert mismatch_of_precisions(Model(dtype="bfloat16").precision, ROLLOUTS, None) == ""
    said = mismatch_of_precisions(FP8, ROLLOUTS, difference(2e-6))
    assert "differ by up to 3.0e-06 in the mean (2.0e-06 on its own first load)" in said
    verdict = verdict_phrase(True, True, ROLLOUTS, ALLOWED, [], (), said)
    assert f"; {said}, allowed 1e-05" in verdict and "largest mean log-prob" not in verdict
    assert "fingerprints show arrival" in section(mismatch=said)
    assert "not measured on a load of its own" in mismatch_of_precisions(FP8, ROLLOUTS, None)


def test_what_was_not_possible_is_named_in_verdict_and_report_and_not_claimed() -> None:
    bare = [{name: value for name, value in each.items() if "tensors" not in name} for each in ROLLOUTS]
    verdict, report = phrase(bare, can_ask=False), section(bare, can_ask=False)
    said = "fingerprints were not possible, as this engine cannot be asked what it holds"
    assert said in verdict and f"- {said}" in report
    for claim in ("by fingerprint", "64-bit fingerprints", "onto poison", "overwrote"):
        assert claim not in verdict and claim not in report


def test_the_section_has_statistics_and_costs() -> None:
    said = section(baseline=difference(4e-6), seconds={"sync": [0.25, 0.75], "verify_baseline": [2.0]})
    for row in ("| mean | 4e-06 | 3e-06 | 1e-05 |", "| sync | 2 | 0.500 | 0.750 |", "| baseline | 1 | 2.000 | 2.000 |"):
        assert row in said
    assert "| poison | 3 | 0.500 | 0.500 |" in said
    assert "No baseline of the log-prob difference, as of old." in section(why_no_baseline="of old")
