"""What verdicts amount to, in process: the project's own Bisection over candidates whose runs are planned."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.tools.bisection import bisection as module
from harness.tools.bisection.answer import EXIT_CODES, sentences
from harness.tools.bisection.bisect_report import write_reports
from harness.tools.bisection.bisection import Bisection
from harness.tools.bisection.installation import Environment
from harness.tools.bisection.question import Options, WrongQuestion
from harness.tools.bisection.state import Attempt, State
from tests.tools.bisection.test_confidence import Anything, Silent, state_of


class Planned(Bisection):
    """Gives each candidate the outcome of its letter: good, bad, skip, other, a port that is taken once.

    B fails with other words, m with the message of b from another function.
    """

    outcomes: str
    taken: bool = False

    def _run_once(self, index: int, environment: Environment, number: int) -> Attempt:
        letter = self.outcomes[index]
        taken = letter == "p" and not self.taken
        self.taken |= taken
        missing = f"KeyError: weight {index} of the layer is missing"
        failure = {"b": missing, "m": missing, "B": "KeyError: weight 9 of this layer is missing"}.get(letter, "")
        verdict = {"b": "bad", "m": "bad", "B": "bad", "s": "skip", "o": "other"}.get(letter, "good")
        return Attempt(
            code=int(verdict != "good"),
            timed_out=False,
            seconds=1.0,
            verdict=verdict,  # type: ignore[arg-type]
            log="log",
            failure=failure,
            reason=failure or verdict,
            may_pass=taken,
            place=f"moving/__init__.py:{'inner' if letter == 'm' else 'work'}",
        )

    def _save(self) -> None:
        """Write nothing."""


def bisected(outcomes: str, **options: object) -> tuple[State, int, str]:
    last = f"1.{len(outcomes) - 1}"
    ends = {"good": last, "bad": "1.0"} if options.get("find_fix") else {"good": "1.0", "bad": last}
    asked = Options(package="moving", probe="none", **ends, **options)  # type: ignore[arg-type]
    state = state_of(asked, len(outcomes))
    state.resolved = True
    planned = Planned(state, Path("/nowhere"), Anything(), Silent(), 0, True)
    planned.outcomes = outcomes
    answer = planned.run()
    return state, EXIT_CODES[answer.kind], " ".join(sentences(state, answer))


CASES: Sequence[tuple[str, dict[str, object], int, Sequence[str]]] = [
    ("bbbbbggggggg", {"find_fix": True}, 0, ["The first good release is 1.5; the last bad one is 1.4."]),
    ("gggggsssbbbb", {}, 1, ["The first bad release is one of 4: 1.5, 1.6, 1.7, 1.8."]),
    ("ggggggoooooooooobbbbb", {"match": "weight"}, 1, ["one of 11: 1.6, 1.7", "masks it in 10: 1.6, 1.7"]),
    (
        "gggbbbggggggggbbbbbb",
        {"second_look": 20, "match": "weight"},
        3,
        ["3 places", "first bad release is 1.3", "first good release is 1.6", "first bad release is 1.14"],
    ),
    (
        "ggbbBB",
        {},
        0,
        ["The first bad release is 1.2;", "The bad end 1.5 fails with other words", "weight 9 of this layer"],
    ),
    (
        "ggbbbmmm",
        {},
        3,
        ["There are two causes", "bad release is 1.2", "(in moving/__init__.py:inner)"],
    ),
    ("sssggggbbbbbss", {}, 0, ["The first bad release is 1.7"]),
]


@pytest.mark.parametrize(("outcomes", "options", "code", "expected"), CASES)
def test_the_answer_to_a_pattern(outcomes: str, options: dict[str, object], code: int, expected: Sequence[str]) -> None:
    _, found, text = bisected(outcomes, **options)
    assert found == code, text
    assert all(part in text for part in expected), text


def test_a_port_that_is_taken_for_a_moment_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_PAUSE_SECONDS", 0.0)
    _, code, text = bisected("ggpbb")
    assert code == 0 and "The first bad release is 1.3; the last good one is 1.2." in text


@pytest.mark.parametrize(
    ("outcomes", "sentence"),
    [("gg", "the bad end 1.1 is good as well"), ("bb", "the good end 1.0 is bad already"), ("go", "another failure")],
)
def test_ends_between_which_there_is_nothing_to_find(outcomes: str, sentence: str) -> None:
    with pytest.raises(WrongQuestion, match=sentence):
        bisected(outcomes)


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ("gggggsssbbbb", ["one of 4", "What changed from 1.4 to 1.8"]),
        ("ggbbbmmm", ["There are two causes", "First failure of 1.2", "First failure of 1.5"]),
    ],
)
def test_the_report_of_a_pattern(tmp_path: Path, outcomes: str, expected: Sequence[str]) -> None:
    state, _, _ = bisected(outcomes)
    planned = Planned(state, tmp_path, Anything(), Silent(), 0, True)
    planned.outcomes = outcomes
    write_reports(state, planned.run(), tmp_path)
    report = (tmp_path / "report.md").read_text()
    assert all(part in report for part in expected), report
