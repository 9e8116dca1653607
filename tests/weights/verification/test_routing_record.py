"""A record of experts that the engine's own log-probs contradict."""

import pytest
import torch

from harness.config.precision import EnginePrecision
from harness.trainer.actor import OldLogProbs
from harness.weights.verification.log_prob_checks import wrong_routing_record

pytestmark = pytest.mark.usefixtures("alone")

OWN = torch.full((2, 8), -1.0)
MASK = torch.ones(2, 8)


def judged(
    precision: EnginePrecision, engine_apart: float, replay_apart: float, differing: bool, replays: bool = False
) -> str:
    """What is said if one token in eight has another expert by the record, and log-probs are this far from the
    trainer's own."""
    named = torch.zeros(2, 8)
    named[:, 0] = differing
    old = OldLogProbs(log_probs=OWN - replay_apart, entropy=OWN, own=OWN, differing=named)
    return wrong_routing_record(precision, OWN - engine_apart, old, MASK, replays=replays)


def test_a_record_of_other_experts_with_the_same_log_probs_is_wrong_in_float32() -> None:
    said = judged("float32", 4e-7, 0.0, True)
    assert "2 of 16 response tokens" in said and "record of experts is wrong" in said
    assert judged("bfloat16", 4e-7, 0.0, True) == "", "there two experts can be as good as the same"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_replay_that_takes_the_trainer_away_from_the_engine_is_of_a_wrong_record(precision: EnginePrecision) -> None:
    assert "routing replay" in judged(precision, 4e-7, 0.4, False)


def test_a_replay_that_moves_nothing_though_experts_differ_has_not_replayed() -> None:
    assert "nothing was replayed" in judged("bfloat16", 0.02, 0.0, True, replays=True)
    assert (
        judged("bfloat16", 0.02, 0.01, True, replays=True) == judged("bfloat16", 0.02, 0.0, False, replays=True) == ""
    )


@pytest.mark.parametrize(
    ("precision", "engine_apart", "replay_apart", "differing"),
    [
        ("float32", 4e-7, 0.0, False),
        ("float32", 0.02, 0.0, True),  # a router chose otherwise, and it shows
        ("float32", 0.02, 0.02, True),  # and a replay takes the difference away
        ("bfloat16", 0.008, 0.004, True),
    ],
)
def test_a_record_that_may_be_true_passes(
    precision: EnginePrecision, engine_apart: float, replay_apart: float, differing: bool
) -> None:
    assert judged(precision, engine_apart, replay_apart, differing) == ""
