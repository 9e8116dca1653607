"""What two runs prove: the one place where outcomes become a verdict, and a verdict an exit code.

| verdict | when | exit code |
|---|---|---|
| reproduced | the broken variant showed its signature and its number, and the control passed | 1, the failure looked for appeared |
| not reproduced | the broken variant passed, or said that this version has no such thing; and the control passed | 0 |
| cannot run here | something is missing here, said by the requirements or by a variant | 125 |
| the control passed, failed | it alone was run | 0, 1 |
| proves nothing | the control failed too, or the broken variant failed in another way | 125 |
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

from harness.runtime.errors import CANNOT_RUN_HERE
from harness.tools.repro.case import Case
from harness.tools.repro.variant import ABSENT, CANNOT

FIXED = "it is fixed in this version, or never was in it."
SHOWN_LINES = 10
LINE_WIDTH = 200
NOISE = re.compile(
    r"Ignore import error when loading|Multi-thread loading shards|^\*+$|^\^+$|OMP_NUM_THREADS|UserWarning: |warnings\.warn\("
)
"""What every engine and every torchrun says."""

Kind = Literal[
    "reproduced", "not reproduced", "cannot run here", "proves nothing", "the control passed", "the control failed"
]
EXIT_CODES: dict[Kind, int] = {
    "reproduced": 1,
    "not reproduced": 0,
    "cannot run here": CANNOT_RUN_HERE,
    "proves nothing": CANNOT_RUN_HERE,
    "the control passed": 0,
    "the control failed": 1,
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One variant's run."""

    exit_code: int | None
    """Of its process, negative for the signal that ended it; None where the time limit did."""
    output: str
    """stdout and stderr together, of all its processes."""
    seconds: float

    def how(self) -> str:
        """How it ended, for people."""
        return f"no end after {self.seconds:.0f} s" if self.exit_code is None else f"exit code {self.exit_code}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is proven."""

    kind: Kind
    sentence: str

    @property
    def exit_code(self) -> int:
        """Of `launch/repro.py run`."""
        return EXIT_CODES[self.kind]


def judge(case: Case, broken: Outcome, healthy: Outcome) -> Verdict:
    """See the module's table."""
    for outcome in (broken, healthy):
        if (reason := said(outcome, CANNOT)) and outcome.exit_code == CANNOT_RUN_HERE:
            return Verdict(kind="cannot run here", sentence=reason)
    if not passes(case, healthy):
        return Verdict(
            kind="proves nothing",
            sentence=f"the healthy control failed too ({why_not(case, healthy)}), so the repro proves nothing.",
        )
    if fails(case, broken):
        return Verdict(
            kind="reproduced", sentence=f"{what_showed(case, broken)}; its control passed{_beside(case, healthy)}."
        )
    if passes(case, broken):
        absent = said(broken, ABSENT)
        return Verdict(kind="not reproduced", sentence=absent or f"both variants pass{_beside(case, broken)}: {FIXED}")
    return Verdict(
        kind="proves nothing", sentence=f"the broken variant failed in another way: {why_not(case, broken)}."
    )


def judge_twin(case: Case, healthy: Outcome) -> Verdict:
    """Where it alone was run."""
    if reason := why_not(case, healthy):
        return Verdict(kind="the control failed", sentence=f"{reason}.")
    return Verdict(kind="the control passed", sentence=f"{healthy.how()}{_beside(case, healthy)}.")


def what_showed(case: Case, broken: Outcome) -> str:
    """What of the failure was seen: the parts of the signature as they stood there, and the number."""
    found = (re.search(each, broken.output) for each in case.signature)
    shown = [f'"{" ".join(match[0].split())}"' for match in found if match]
    return ", ".join(shown + ([f"{case.number.name}: {_number(case, broken):g}"] if case.number else []))


def _beside(case: Case, outcome: Outcome) -> str:
    return f" ({case.number.name}: {_number(case, outcome):g})" if case.number else ""


def fails(case: Case, outcome: Outcome) -> bool:
    """Whether it failed in the known way."""
    return shows(case, outcome.output) and (case.number is None or _number(case, outcome) > case.number.broken_above)


def shows(case: Case, output: str) -> bool:
    """Whether it has the whole signature."""
    return all(re.search(each, output) for each in case.signature)


def passes(case: Case, outcome: Outcome) -> bool:
    """Whether it ended well, and shows nothing of the failure."""
    return why_not(case, outcome) == ""


def why_not(case: Case, outcome: Outcome) -> str:
    """Why it did not pass; empty where it did."""
    if outcome.exit_code != 0:
        return outcome.how()
    for each in case.signature:
        if found := re.search(each, outcome.output):
            return f'it shows "{found[0]}"'
    if case.number and not said(outcome, ABSENT) and not (value := _number(case, outcome)) < case.number.healthy_below:
        return f"{case.number.name} is {value:g}, not below {case.number.healthy_below:g}"
    return ""


def decisive(case: Case, output: str) -> list[str]:
    """At most SHOWN_LINES lines that tell most: those that match, what was measured, and what stands at the end."""
    lines = [line.strip()[:LINE_WIDTH] for line in output.splitlines() if line.strip()]
    lines = [line for line in lines if not NOISE.search(line)]
    wanted = [*case.signature, *([rf"{re.escape(case.number.name)}: "] if case.number else []), CANNOT, ABSENT]
    first = {each: next((n for n, line in enumerate(lines) if re.search(each, line)), None) for each in wanted}
    chosen = {n for n in first.values() if n is not None}
    chosen |= set(range(len(lines) - (SHOWN_LINES - len(chosen)), len(lines))) if not chosen else set()
    for n in sorted(chosen):  # each with what led to it, as far as there is room
        chosen |= {near for near in (n - 1, n + 1) if 0 <= near < len(lines) and len(chosen) < SHOWN_LINES}
    return [lines[n] for n in sorted(chosen) if n >= 0][:SHOWN_LINES]


def said(outcome: Outcome, beginning: str) -> str:
    """The rest of the first line that begins so; empty where there is none."""
    return next(
        (line.removeprefix(beginning) for line in outcome.output.splitlines() if line.startswith(beginning)), ""
    )


def _number(case: Case, outcome: Outcome) -> float:
    value = case.number.read(outcome.output) if case.number else None
    return math.nan if value is None else value
