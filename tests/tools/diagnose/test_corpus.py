"""Logs of other people: how many are named, and that none is named wrongly with confidence. And logs with one answer."""

import json
import tomllib
from itertools import combinations
from typing import Any

import pytest

from harness.tools.diagnose.diagnose import diagnose
from harness.tools.diagnose.diagnosis_text import as_json, as_text
from harness.tools.diagnose.entries import UNKNOWN, catalogue
from harness.tools.diagnose.symptoms import LAST_LINES
from tests.tools.diagnose.corpus.score import FOLDER, SETS, answers, false_names, named_share

WRITTEN = FOLDER / "written"
INDEX: dict[str, dict[str, dict[str, Any]]] = {
    name: tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))["logs"] for name in (*SETS, WRITTEN.name)
}


NAMED = {"signatures": 0.97, "measure": 0.96, "fresh": 0.85}
"""Least share of the known logs whose cause is named, for sure or not: just below what holds. Signatures were written on
the first two, so that only fresh says how unseen logs fare."""


@pytest.mark.parametrize("name", SETS)
def test_no_name_is_known_wrongly_and_most_causes_are_named(name: str) -> None:
    found = answers(FOLDER / name)
    assert not false_names(found, is_known=True)
    assert named_share(found) >= NAMED[name]


@pytest.mark.parametrize("name", SETS)
def test_causes_are_of_the_catalogue_and_each_log_has_its_source(name: str) -> None:
    assert {each["cause"] for each in INDEX[name].values()} <= {*catalogue(), UNKNOWN}
    for log, each in INDEX[name].items():
        assert each["source"].startswith(f"https://github.com/{each['project']}/"), log
        assert each["why"], log


def test_no_project_is_in_two_sets() -> None:
    projects = [{each["project"] for each in INDEX[name].values()} for name in SETS]
    assert not [one & other for one, other in combinations(projects, 2) if one & other]


@pytest.mark.parametrize("log", INDEX[WRITTEN.name])
def test_a_written_log_has_its_whole_answer(log: str) -> None:
    expected = INDEX[WRITTEN.name][log]
    found = diagnose([str(WRITTEN / f"{log}.log")])
    values = json.loads(as_json(found))
    answer = {
        "cause": values["slug"] or values["verdict"],
        "sure": values["verdict"] == "known",
        "first": values["suspicious"] and values["suspicious"]["line"],
        "ends": values["ending"] and values["ending"]["line"],
        "went_on": values["went_on"] and values["went_on"]["line"],
        "doubts": [each["line"] for each in values["doubts"]],
        "also": [each["slug"] for each in values["also"]],
    }
    nothing = {"sure": False, "first": None, "ends": None, "went_on": None, "doubts": [], "also": []}
    assert answer == nothing | {key: value for key, value in expected.items() if key not in ("says", "source")}
    assert expected.get("says", "") in " ".join(as_text(found).split())
    texts = [each["text"] for each in values["evidence"]]
    assert len(set(texts)) == len(texts), "a sentence is shown once"
    lines = (WRITTEN / f"{log}.log").read_text(encoding="utf-8").split("\n")
    shown = min(LAST_LINES, len(list(filter(str.strip, lines)))) if answer["cause"] == "no failure" else 0
    assert as_text(found).count("last line: ") == len(values["last"]) == shown


def test_each_written_log_is_in_the_table() -> None:
    assert {file.stem for file in WRITTEN.glob("*.log")} == set(INDEX[WRITTEN.name])
