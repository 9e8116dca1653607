"""Logs of other people: how many are named, and that none is named wrongly with confidence."""

import tomllib
from dataclasses import dataclass
from itertools import combinations

import pytest

from harness.tools.diagnose.diagnose import Confidence
from harness.tools.diagnose.entries import UNKNOWN, catalogue
from tests.tools.diagnose.corpus.score import FOLDER, SETS, Answer, answers, false_names, named_share

INDEX = {
    name: tomllib.loads(file.read_text(encoding="utf-8"))["logs"]
    for name in SETS
    if (file := FOLDER / f"{name}.toml").is_file()
}


@dataclass(frozen=True, kw_only=True)
class Floor:
    """What a set must keep to; how each was measured is in harness/tools/diagnose/README.md."""

    named: float
    """Least share of the known logs whose cause is named."""
    high: int = 0
    """Most false names of high confidence."""
    medium: int
    """The same of medium confidence: at most 1 in 50 logs."""


FLOORS = {
    "signatures": Floor(named=0.97, medium=0),
    "measure": Floor(named=0.96, medium=0),
    "fresh": Floor(named=0.85, medium=0),
}
"""Just below what holds. Signatures were written on the first two, so that only fresh says how unseen logs fare."""


@pytest.mark.parametrize("name", SETS)
def test_names_keep_to_their_floor(name: str) -> None:
    found, floor = answers(FOLDER / name), FLOORS[name]
    assert len(false_names(found, "high")) <= floor.high
    assert len(false_names(found, "medium")) <= floor.medium
    assert named_share(found) >= floor.named


def test_the_score_tells_right_false_and_missed() -> None:
    def answer(cause: str, named: str, confidence: Confidence | None) -> Answer:
        return Answer(log="a", cause=cause, named=named, confidence=confidence)

    found = [
        answer("fp8-reload", "fp8-reload", "low"),
        answer("fp8-reload", UNKNOWN, None),
        answer("fp8-reload", "safe-unpickler", "high"),
        answer(UNKNOWN, "safe-unpickler", "high"),
        answer(UNKNOWN, UNKNOWN, None),
    ]
    assert named_share(found) == pytest.approx(1 / 3)
    assert [each.cause for each in false_names(found, "high")] == ["fp8-reload", UNKNOWN]
    assert not false_names(found, "low")


@pytest.mark.parametrize("name", INDEX)
def test_causes_are_of_the_catalogue_and_each_log_has_its_source(name: str) -> None:
    assert {each["cause"] for each in INDEX[name].values()} <= {*catalogue(), UNKNOWN}
    for log, each in INDEX[name].items():
        assert each["source"].startswith(f"https://github.com/{each['project']}/"), log
        assert each["why"], log


def test_no_project_is_in_two_sets() -> None:
    projects = [{each["project"] for each in logs.values()} for logs in INDEX.values()]
    assert not [one & other for one, other in combinations(projects, 2) if one & other]
