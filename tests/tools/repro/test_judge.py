"""What two outcomes prove."""

import pytest

from harness.tools.repro.case import Case
from harness.tools.repro.run_cases import EXIT_CODES, decisive_lines, judge
from harness.tools.trial.trial import Outcome, judge_words

WORDS = Case(broken="b", healthy="h", signature=(r"it (broke|burst)", r"code \d+"))
GOOD = "all is well"
BROKE = "it broke\ncode 7"


def outcome(output: str, code: int | None = 0) -> Outcome:
    """code: None for a program that did not end."""
    made = Outcome(code=-9 if code is None else code, timed_out=code is None, seconds=1.0, verdict="skip", log="")
    made.verdict, made.reason = judge_words(WORDS.signature, output, made.code, made.ending)
    return made


@pytest.mark.parametrize(
    ("broken", "healthy", "kind", "exit_code", "words"),
    [
        (outcome(BROKE, 1), outcome(GOOD), "reproduced", 1, '"it broke", "code 7"; its control passed'),
        (outcome(BROKE, -9), outcome(GOOD), "reproduced", 1, "it broke"),
        (outcome(BROKE, None), outcome(GOOD), "reproduced", 1, "it broke"),
        (outcome(BROKE, 0), outcome(GOOD), "reproduced", 1, "it broke"),
        (outcome(GOOD), outcome(GOOD), "not reproduced", 0, "fixed in this version"),
        (outcome(BROKE, 1), outcome(GOOD, 1), "proves nothing", 125, "the healthy control failed too (exit code 1)"),
        (outcome(BROKE, 1), outcome(GOOD, None), "proves nothing", 125, "no end after 1 s"),
        (outcome(BROKE, 1), outcome("code 3"), "proves nothing", 125, 'it shows "code 3"'),
        (outcome("it broke", 1), outcome(GOOD), "proves nothing", 125, "failed in another way: exit code 1"),
        (outcome("it broke", 0), outcome(GOOD), "proves nothing", 125, 'another way: it shows "it broke"'),
    ],
)
def test_verdict(broken: Outcome, healthy: Outcome, kind: str, exit_code: int, words: str) -> None:
    found, sentence = judge(broken, healthy)
    assert (found, EXIT_CODES[found]) == (kind, exit_code)
    assert words in sentence


def test_the_decisive_lines_are_few_and_have_what_matters() -> None:
    log = "\n".join([*(f"line {n}" for n in range(100)), "before", "it broke", "after", "code 7", *["tail"] * 50])
    lines = decisive_lines(WORDS, log)
    assert {"before", "it broke", "after", "code 7"} <= set(lines) and len(lines) <= 10
    assert decisive_lines(WORDS, "one\ntwo") == ["one", "two"]
    assert decisive_lines(WORDS, "") == []
    assert decisive_lines(WORDS, "\n".join(map(str, range(40)))) == [str(n) for n in range(30, 40)]
