"""What two outcomes prove."""

import math

import pytest

from harness.tools.repro.case import ABSENT, CANNOT, Case, Number
from harness.tools.repro.run_cases import EXIT_CODES, VariantOutcome, decisive_lines, judge

WORDS = Case(broken="b", healthy="h", signature=(r"it (broke|burst)", r"code \d+"))
GAP = Number(name="gap", broken_above=0.1, healthy_below=0.05)
MEASURED = Case(broken="b", healthy="h", number=GAP)
BOTH = Case(broken="b", healthy="h", signature=("lost",), number=GAP)
GOOD = "all is well"
BROKE = "it broke\ncode 7"


def outcome(output: str, code: int | None = 0) -> VariantOutcome:
    return VariantOutcome(exit_code=code, output=output, seconds=1.0)


def verdict_of(case: Case, broken: VariantOutcome, healthy: VariantOutcome) -> tuple[str, str]:
    return judge(case, {"broken": broken, "healthy": healthy})


@pytest.mark.parametrize(
    ("broken", "healthy", "kind", "exit_code", "words"),
    [
        (outcome(BROKE, 1), outcome(GOOD), "reproduced", 1, '"it broke", "code 7"; its control passed'),
        (outcome(BROKE, -9), outcome(GOOD), "reproduced", 1, "it broke"),
        (outcome(BROKE, None), outcome(GOOD), "reproduced", 1, "it broke"),
        (outcome(BROKE, 0), outcome(GOOD), "reproduced", 1, "it broke"),
        (outcome(GOOD), outcome(GOOD), "not reproduced", 0, "fixed in this version"),
        (outcome(ABSENT + "no such call."), outcome(GOOD), "not reproduced", 0, "no such call."),
        (outcome(BROKE, 1), outcome(GOOD, 1), "proves nothing", 125, "the healthy control failed too (exit code 1)"),
        (outcome(BROKE, 1), outcome(GOOD, None), "proves nothing", 125, "no end after 1 s"),
        (outcome(BROKE, 1), outcome("code 3"), "proves nothing", 125, 'it shows "code 3"'),
        (outcome("it broke", 1), outcome(GOOD), "proves nothing", 125, "failed in another way: exit code 1"),
        (outcome("it broke", 0), outcome(GOOD), "proves nothing", 125, 'another way: it shows "it broke"'),
        (outcome(CANNOT + "no GPU.", 125), outcome(GOOD), "cannot run here", 125, "no GPU."),
        (outcome(BROKE, 1), outcome(CANNOT + "no GPU.", 125), "cannot run here", 125, "no GPU."),
        # A log that quotes the words, and ends otherwise, is no refusal.
        (outcome(CANNOT + "no GPU.", 1), outcome(GOOD), "proves nothing", 125, "exit code 1"),
    ],
)
def test_verdict_of_a_signature(
    broken: VariantOutcome, healthy: VariantOutcome, kind: str, exit_code: int, words: str
) -> None:
    found, sentence = verdict_of(WORDS, broken, healthy)
    assert (found, EXIT_CODES[found]) == (kind, exit_code)
    assert words in sentence


@pytest.mark.parametrize(
    ("broken", "healthy", "kind"),
    [
        ("gap: 0.2", "gap: 0.01", "reproduced"),
        ("gap: 0.01\ngap: 0.2", "gap: 0.2\ngap: 0.01", "reproduced"),  # the last one counts
        ("gap: inf", "gap: 0.01", "reproduced"),
        ("gap: 0.01", "gap: 0.01", "not reproduced"),
        ("gap: 0.07", "gap: 0.01", "proves nothing"),
        ("gap: nan", "gap: 0.01", "proves nothing"),
        ("nothing", "gap: 0.01", "proves nothing"),
        ("gap: 0.2", "gap: 0.07", "proves nothing"),
        ("gap: 0.2", "gap: nan", "proves nothing"),
        ("gap: 0.2", "nothing", "proves nothing"),
    ],
)
def test_verdict_of_a_number(broken: str, healthy: str, kind: str) -> None:
    assert verdict_of(MEASURED, outcome(broken), outcome(healthy))[0] == kind


def test_a_case_with_both_needs_both() -> None:
    assert verdict_of(BOTH, outcome("lost\ngap: 0.2"), outcome("gap: 0.01"))[0] == "reproduced"
    assert verdict_of(BOTH, outcome("gap: 0.2"), outcome("gap: 0.01"))[0] == "proves nothing"
    assert verdict_of(BOTH, outcome("lost\ngap: 0.01"), outcome("gap: 0.01"))[0] == "proves nothing"


def test_the_control_alone() -> None:
    assert judge(MEASURED, {"healthy": outcome("gap: 0.01")})[0] == "the control passed"
    kind, sentence = judge(MEASURED, {"healthy": outcome("gap: 0.3")})
    assert kind == "the control failed" and "gap is 0.3, not below 0.05" in sentence


def test_an_absent_thing_has_no_number() -> None:
    absent = outcome(ABSENT + "sglang 0.4 has none.")
    assert verdict_of(MEASURED, absent, absent)[1] == "sglang 0.4 has none."


def test_a_number_is_read_from_its_own_line_only() -> None:
    assert GAP.read("rank 0: gap: 0.5") == 0.5
    assert math.isnan(GAP.read("the gap: 0.5 of it all"))


def test_the_decisive_lines_are_few_and_have_what_matters() -> None:
    log = "\n".join([*(f"line {n}" for n in range(100)), "before", "it broke", "after", "code 7", *["tail"] * 50])
    lines = decisive_lines(WORDS, log)
    assert {"before", "it broke", "after", "code 7"} <= set(lines) and len(lines) <= 10
    assert decisive_lines(WORDS, "one\ntwo") == ["one", "two"]
    assert decisive_lines(WORDS, "") == []
    assert decisive_lines(WORDS, "\n".join(map(str, range(40)))) == [str(n) for n in range(30, 40)]
