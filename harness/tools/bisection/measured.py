"""What the numbers of a --metric bisect say beyond their verdicts: the limit, their order, and where they jump."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from harness.tools.bisection.search import Edge
from harness.tools.bisection.state import Record, State

MOST_STEPS = 3


@dataclass(frozen=True, slots=True)
class Step:
    """From one measured candidate to the next one in order."""

    before: int
    after: int
    change: float
    """Positive where it got worse; infinite for NaN."""


def number_of(record: Record) -> float | None:
    """The median of its runs; None where none told it."""
    numbers = [attempt.value for attempt in record.attempts if attempt.value is not None]
    return median(numbers) if numbers else None


def reference(state: State) -> float | None:
    """The good end's number, once it is known to be good."""
    good = state.end("good")
    if good is None or state.verdicts[good] != "good":
        return None
    return number_of(state.record(good))


def limit(state: State) -> float | None:
    """Beyond which a number is bad; None while the good end's is not known."""
    options, base = state.question.options, reference(state)
    if options.above is not None or options.below is not None:
        return options.above if options.above is not None else options.below
    ratio = state.question.ratio
    return ratio * base if ratio is not None and base is not None else None


def sentences(state: State, edge: Edge | None) -> list[str]:
    """The limit, and where the largest step is another one than that over the limit."""
    bound = limit(state)
    if state.question.kind != "metric" or bound is None:
        return []
    options = state.question.options
    where = "below" if options.below is not None else "above"
    base = reference(state)
    times = f", {options.worse.rstrip('x')} times the good end's {base:.6g}" if options.worse else ""
    told = [f"{options.metric} is bad {where} {bound:.6g}{times}."]
    steps = _steps(state)
    crossing = next((step for step in steps if edge and edge.before <= step.before and step.after <= edge.after), None)
    larger = sorted((s for s in steps if crossing and s.change > crossing.change), key=lambda s: -s.change)[:MOST_STEPS]
    if crossing and larger:
        places = "; ".join(_shown(state, step) for step in sorted(larger, key=lambda step: step.before))
        told.append(
            f"It changes in several steps, and larger than the one over the limit ({_shown(state, crossing)}) are: {places}."
        )
    return told


def table(state: State) -> Iterator[str]:
    """The numbers in order of release."""
    if state.question.kind != "metric":
        return
    base = reference(state)
    yield from (
        "## Numbers in order",
        "",
        f"| candidate | {state.question.options.metric} | of the good end's | verdict |",
    )
    yield "|---|---|---|---|"
    for index, number in sorted(_numbers(state).items()):
        share = f"{number / base:.3f}" if base else "-"
        yield f"| {state.candidates[index].shown.replace('|', '/')} | {number:.6g} | {share} | {state.verdicts[index]} |"
    yield ""


def _numbers(state: State) -> dict[int, float]:
    found = {state.index(record.name): number_of(record) for record in state.records}
    return {index: number for index, number in found.items() if number is not None}


def _steps(state: State) -> list[Step]:
    """Between neighbours among the measured ones, in the direction from good to bad."""
    numbers, options = _numbers(state), state.question.options
    sign = (-1 if options.below is not None else 1) * (-1 if options.find_fix else 1)
    steps = []
    for before, after in pairwise(sorted(numbers)):
        change = sign * (numbers[after] - numbers[before])
        steps.append(Step(before, after, math.inf if math.isnan(change) else change))
    return steps


def _shown(state: State, step: Step) -> str:
    low, high = (_numbers(state)[index] for index in (step.before, step.after))
    names = " to ".join(state.candidates[index].shown for index in (step.before, step.after))
    share = f", {high / low - 1:+.1%}" if low and math.isfinite(high / low) else ""
    between = step.after - step.before - 1
    unseen = f" ({between} between them not run)" if between else ""
    return f"{names}{unseen}, {low:.6g} to {high:.6g}{share}"
