"""Failures that come and go, simulated: the project's own Bisection over runs that are drawn and not made."""

import random
from dataclasses import dataclass

import pytest

from harness.config.mistakes import ConfigError
from harness.tools.bisection.bisect_report import sentences
from harness.tools.bisection.confidence import confidence, runs_spent
from tests.tools.bisection.planned import answer, failed, new_state, passed

CANDIDATES = 22


@dataclass
class Outcome:
    """Of one simulated bisect that was not refused."""

    right: bool
    stated: float | None
    kind: str
    runs: int
    again: int
    told: list[str]


def bisect(rate: float, repeat: int, seed: int, monkeypatch: pytest.MonkeyPatch, confirm: int = 400) -> Outcome | None:
    """None where an end was refused: the bad one passed each time."""
    chance = random.Random(f"{rate} {repeat} {seed}")
    state, first_bad = new_state(CANDIDATES, repeat=repeat, confirm=confirm), chance.randrange(1, CANDIDATES)
    try:
        found = answer(
            state,
            lambda index: failed("off") if index >= first_bad and chance.random() < rate else passed(),
            monkeypatch,
        )
    except ConfigError as error:
        assert "if it fails rarely, give more than --repeat" in str(error)
        return None
    runs = sum(len(record.attempts) for record in state.records)
    right = len(found.edges) == 1 and found.edges[0].after == first_bad
    return Outcome(right, confidence(state), found.kind, runs, runs_spent(state), sentences(state, found))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_what_is_said_to_be_sure_is_as_right_as_is_said(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    found = [outcome for seed in range(120) if (outcome := bisect(rate, 8, seed, monkeypatch))]
    told = [outcome for outcome in found if outcome.stated is not None]
    right = sum(outcome.right for outcome in told) / len(told)
    stated = sum(outcome.stated or 0.0 for outcome in told) / len(told)
    sure = [outcome for outcome in told if outcome.kind == "found"]
    wrong = sum(not outcome.right for outcome in sure) / max(1, len(sure))
    assert all((outcome.stated or 0.0) >= 0.95 for outcome in sure)
    assert all((outcome.stated or 1.0) < 0.95 for outcome in told if outcome.kind == "probable")
    assert abs(stated - right) <= 0.04 and wrong <= 0.06, (stated, right, wrong)


def test_without_runs_to_confirm_it_is_probable(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [outcome for seed in range(60) if (outcome := bisect(0.25, 4, seed, monkeypatch, confirm=0))]
    probable = [outcome for outcome in found if outcome.kind == "probable"]
    assert len(probable) > len(found) / 2 and all(outcome.again == 0 for outcome in found)
    told = " ".join(probable[0].told)
    assert "is probably" in told and "less than 95%: give more --repeat or more --confirm" in told
    sure = bisect(0.5, 16, 1, monkeypatch)
    assert sure and sure.kind == "found" and "probably" not in " ".join(sure.told)
