"""From the outcomes of two variants to a verdict, and from a verdict to an exit code.

| verdict | when | exit code |
|---|---|---|
| reproduced | the broken variant showed its signature and its number, and the control passed | 1 |
| not reproduced | the broken variant passed, or said that this version has no such thing; and the control passed | 0 |
| cannot run here | something is missing here, by the requirements or by a variant's own words | 125 |
| the control passed, failed | it alone was run | 0, 1 |
| proves nothing | the control failed too, or the broken variant failed in another way | 125 |
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from harness.runtime.errors import CANNOT_RUN_HERE
from harness.tools.repro.case import ABSENT, CANNOT, Case, Variant

FIXED = "it is fixed in this version, or never was in it."
SHOWN_LINES = 10
LINE_WIDTH = 200
NOISE = re.compile(
    r"Ignore import error when loading|Multi-thread loading shards|^\*+$|^\^+$|OMP_NUM_THREADS|UserWarning: |warnings\.warn\("
)
"""Lines that every engine and every torchrun prints."""

VerdictKind = Literal[
    "reproduced", "not reproduced", "cannot run here", "proves nothing", "the control passed", "the control failed"
]
EXIT_CODES: dict[VerdictKind, int] = {
    "reproduced": 1,
    "not reproduced": 0,
    "cannot run here": CANNOT_RUN_HERE,
    "proves nothing": CANNOT_RUN_HERE,
    "the control passed": 0,
    "the control failed": 1,
}


@dataclass(frozen=True, kw_only=True)
class VariantOutcome:
    """How one variant ended."""

    exit_code: int | None
    """Negative for the signal that ended the process; None if it was still running at its time limit."""
    output: str
    """Standard output and standard error of all its processes."""
    seconds: float

    def ending(self) -> str:
        """Describe how it ended."""
        return f"no end after {self.seconds:.0f} s" if self.exit_code is None else f"exit code {self.exit_code}"

    def after(self, beginning: str) -> str:
        """Return the rest of the first line that begins so, empty without one."""
        lines = (line for line in self.output.splitlines() if line.startswith(beginning))
        return next(lines, beginning).removeprefix(beginning)


@dataclass(frozen=True, kw_only=True)
class CaseVerdict:
    """What the outcomes show."""

    kind: VerdictKind
    sentence: str

    @property
    def exit_code(self) -> int:
        """The exit code of `launch/repro.py run`."""
        return EXIT_CODES[self.kind]


def judge(case: Case, outcomes: Mapping[Variant, VariantOutcome]) -> CaseVerdict:
    """Return the verdict by the table of this module; outcomes: of both variants, or of the healthy one."""
    for outcome in outcomes.values():
        if (reason := outcome.after(CANNOT)) and outcome.exit_code == CANNOT_RUN_HERE:
            return CaseVerdict(kind="cannot run here", sentence=reason)
    healthy = outcomes["healthy"]
    measured, reason = _measured(case, healthy), problem(case, healthy)
    if "broken" not in outcomes:
        if reason:
            return CaseVerdict(kind="the control failed", sentence=f"{reason}.")
        return CaseVerdict(kind="the control passed", sentence=f"{healthy.ending()}{measured}.")
    if reason:
        sentence = f"the healthy control failed too ({reason}), so the repro proves nothing."
        return CaseVerdict(kind="proves nothing", sentence=sentence)
    broken = outcomes["broken"]
    matches = [re.search(each, broken.output) for each in case.signature]
    if all(matches) and (case.number is None or _number(case, broken) > case.number.broken_above):
        shown = [f'"{" ".join(match[0].split())}"' for match in matches if match]
        shown += [f"{case.number.name}: {_number(case, broken):g}"] if case.number else []
        return CaseVerdict(kind="reproduced", sentence=f"{', '.join(shown)}; its control passed{measured}.")
    if reason := problem(case, broken):
        return CaseVerdict(kind="proves nothing", sentence=f"the broken variant failed in another way: {reason}.")
    sentence = broken.after(ABSENT) or f"both variants pass{_measured(case, broken)}: {FIXED}"
    return CaseVerdict(kind="not reproduced", sentence=sentence)


def problem(case: Case, outcome: VariantOutcome) -> str:
    """Return why a variant did not pass, empty if it did."""
    if outcome.exit_code != 0:
        return outcome.ending()
    for each in case.signature:
        if found := re.search(each, outcome.output):
            return f'it shows "{found[0]}"'
    number = case.number
    if number and not outcome.after(ABSENT) and not (value := _number(case, outcome)) < number.healthy_below:
        return f"{number.name} is {value:g}, not below {number.healthy_below:g}"
    return ""


def decisive_lines(case: Case, output: str) -> list[str]:
    """Return at most SHOWN_LINES lines: matches and measurements with their neighbours, else the last lines."""
    lines = [line.strip()[:LINE_WIDTH] for line in output.splitlines() if line.strip()]
    lines = [line for line in lines if not NOISE.search(line)]
    wanted = [*case.signature, *([rf"{re.escape(case.number.name)}: "] if case.number else []), CANNOT, ABSENT]
    first = (next((n for n, line in enumerate(lines) if re.search(each, line)), None) for each in wanted)
    chosen = {n for n in first if n is not None}
    if not chosen:
        return lines[-SHOWN_LINES:]
    for n in sorted(chosen):
        chosen |= {near for near in (n - 1, n + 1) if 0 <= near < len(lines) and len(chosen) < SHOWN_LINES}
    return [lines[n] for n in sorted(chosen)][:SHOWN_LINES]


def _measured(case: Case, outcome: VariantOutcome) -> str:
    return f" ({case.number.name}: {_number(case, outcome):g})" if case.number else ""


def _number(case: Case, outcome: VariantOutcome) -> float:
    value = case.number.read(outcome.output) if case.number else None
    return math.nan if value is None else value
