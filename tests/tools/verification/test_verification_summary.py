from pathlib import Path

import pytest

from harness.tools.verification.verification_summary import verdict_phrase
from tests.weights.test_verify import Level, difference, verification

ROLLOUTS: list[dict[str, float]] = [
    difference(mean).metrics()
    | {"seconds/sync": 9.0, "seconds/verify_sentinel": 0.5, "seconds/verify_readback": 2 * mean}
    | {"sync_proven_by_log_probs": 1.0, "sync_tensors": 27, "sync_tensors_compared": 27}
    for mean in (1e-6, 3e-6, 2e-6)
]
SMALL_UPDATES = [
    ROLLOUTS[0],
    *(
        each | {"sync_proven_by_log_probs": 0.0, "sync_movement": moved}
        for each, moved in ((ROLLOUTS[1], 2e-6), (ROLLOUTS[2], 4e-6))
    ),
]
"""What log-probs say of them is nothing, save for the first, which came onto garbage."""


def test_off_claims_nothing(tmp_path: Path) -> None:
    phrase = '3 weight syncs, not verified (weights.verify = "off"): largest mean log-prob difference 3.0e-06'
    assert verdict_phrase(verification(tmp_path, "off"), ROLLOUTS) == phrase


@pytest.mark.parametrize(("level", "done"), [("log_probs", False), ("bytes", True), ("full", True)])
def test_the_verdict_claims_what_the_level_checked(level: Level, done: bool, tmp_path: Path) -> None:
    phrase = verdict_phrase(verification(tmp_path, level), ROLLOUTS)
    assert phrase.startswith("3 weight syncs: ")
    assert "after each, all 27 tensors in the engine equal the trainer's by fingerprint" in phrase
    assert "the engine's log-probs prove each" in phrase
    assert ("read back bit for bit" in phrase) == done
    assert phrase.endswith("largest mean difference 3.0e-06, allowed 1e-05")


def test_log_probs_are_not_said_to_prove_an_update_that_moves_them_less_than_is_allowed(tmp_path: Path) -> None:
    checks = verification(tmp_path)
    phrase = verdict_phrase(checks, SMALL_UPDATES)
    assert "the engine's log-probs prove 1 of 3 (for 2 the update moved log-probs by at most 4.0e-06" in phrase


def test_without_fingerprints_what_log_probs_do_not_prove_is_shown_by_nothing(tmp_path: Path) -> None:
    bare = [{name: value for name, value in each.items() if "tensors" not in name} for each in SMALL_UPDATES]
    phrase = verdict_phrase(verification(tmp_path), bare)
    assert "fingerprint" not in phrase and "nothing shows the others" in phrase


def test_tensors_that_cannot_be_followed_are_counted(tmp_path: Path) -> None:
    some = [each | {"sync_tensors_compared": 25} for each in ROLLOUTS]
    assert "after each, 25 of 27 tensors in the engine equal" in verdict_phrase(verification(tmp_path), some)
