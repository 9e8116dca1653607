"""What verdicts amount to."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from harness.config.mistakes import ConfigError
from harness.tools.bisection.bisect_report import EXIT_CODES, Answer, write_report
from harness.tools.trial.trial import Outcome
from tests.tools.bisection.planned import answer, failed, new_state, passed

MISSING = "KeyError: weight {} of the layer is missing"
LETTERS = {
    "g": passed(),
    "s": replace(failed("cannot run here"), verdict="skip"),
    "o": replace(failed("RuntimeError: out of memory"), verdict="other"),
    "b": failed(MISSING.format(1), "moving/core.py:work"),
    "c": failed(MISSING.format(2), "moving/core.py:work"),  # other numbers: the same cause
    "i": failed(MISSING.format(1), "moving/core.py:inner"),
    "v": failed("ValueError: off"),
}


def bisected(outcomes: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> tuple[Answer, str]:
    """Give each candidate the outcome of its letter; return the answer and its report."""
    state = new_state(len(outcomes), **options)
    found = answer(state, lambda index: LETTERS[outcomes[index]], monkeypatch)
    write_report(state, found, folder)
    return found, " ".join((folder / "report.md").read_text().split())


CASES: Sequence[tuple[str, dict[str, object], int, Sequence[str]]] = [
    ("bbbbbggggggg", {"find_fix": True}, 0, ["The first good release is 1.5; the last bad one is 1.4."]),
    (
        "gggggsssbbbb",
        {},
        1,
        ["The first bad release is one of 4: 1.5, 1.6, 1.7, 1.8.", "What changed from 1.4 to 1.8"],
    ),
    (
        "ggggggoooooooooobbbbb",
        {"match": "weight"},
        1,
        ["one of 11: 1.6, 1.7", "masks it in 10: 1.6, 1.7", "RuntimeError: out of memory"],
    ),
    ("ggbbcc", {}, 0, ["The first bad release is 1.2;"]),
    (
        "ggbbbiii",
        {},
        3,
        [
            "There are two causes",
            "bad release is 1.2",
            "(in moving/core.py:inner)",
            "First failure of 1.2",
            "First failure of 1.5",
        ],
    ),
    (
        "gggggbbbbbbvvvvvvv",
        {},
        3,
        ["first seen at 1.11", "may hide it: 1.5, ", "--match 'ValueError: off' looks"],
    ),
    ("gsssggggbbbbbssb", {}, 0, ["The first bad release is 1.8"]),
]


@pytest.mark.parametrize(("outcomes", "options", "code", "expected"), CASES)
def test_the_report_of_a_pattern(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    outcomes: str,
    options: dict[str, object],
    code: int,
    expected: Sequence[str],
) -> None:
    found, report = bisected(outcomes, tmp_path, monkeypatch, **options)
    assert EXIT_CODES[found.kind] == code, report
    assert all(part in report for part in expected), report


def test_a_port_that_is_in_use_for_a_moment_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    in_use = replace(failed("OSError: Address already in use"), may_pass=True)
    outcomes = {index: [passed()] * 2 for index in range(3)} | {index: [failed("ValueError: off")] for index in (3, 4)}
    outcomes[2] = [in_use, passed()]

    def outcome(index: int) -> Outcome:
        return outcomes[index].pop(0)

    state = new_state(5)
    assert answer(state, outcome, monkeypatch).kind == "found" and state.verdicts[2] == "good"


@pytest.mark.parametrize(
    ("outcomes", "sentence"),
    [
        ("gg", "the bad end 1.1 is not bad: it passed; if it fails rarely, give more than --repeat 1"),
        ("bb", "the good end 1.0 is bad already"),
        ("go", "fails, but not with the failure looked for"),
        ("sggb", "the good end 1.0 could not be classified: cannot run here; give another end"),
    ],
)
def test_ends_between_which_there_is_nothing_to_find(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcomes: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        bisected(outcomes, tmp_path, monkeypatch)
