"""Logs of other people: how many are named, and that none is named wrongly with confidence."""

import tomllib
from itertools import combinations

import pytest

from harness.tools.diagnose.entries import UNKNOWN, catalogue
from tests.tools.diagnose.corpus.score import FOLDER, SETS, answers, false_names, named_share

INDEX = {
    name: tomllib.loads(file.read_text(encoding="utf-8"))["logs"]
    for name in SETS
    if (file := FOLDER / f"{name}.toml").is_file()
}


NAMED = {"signatures": 0.97, "measure": 0.96, "fresh": 0.85}
"""Least share of the known logs whose cause is named, for sure or not: just below what holds. Signatures were written on
the first two, so that only fresh says how unseen logs fare."""


@pytest.mark.parametrize("name", SETS)
def test_no_name_is_known_wrongly_and_most_causes_are_named(name: str) -> None:
    found = answers(FOLDER / name)
    assert not false_names(found, is_known=True)
    assert named_share(found) >= NAMED[name]


@pytest.mark.parametrize("name", INDEX)
def test_causes_are_of_the_catalogue_and_each_log_has_its_source(name: str) -> None:
    assert {each["cause"] for each in INDEX[name].values()} <= {*catalogue(), UNKNOWN}
    for log, each in INDEX[name].items():
        assert each["source"].startswith(f"https://github.com/{each['project']}/"), log
        assert each["why"], log


def test_no_project_is_in_two_sets() -> None:
    projects = [{each["project"] for each in logs.values()} for logs in INDEX.values()]
    assert not [one & other for one, other in combinations(projects, 2) if one & other]
