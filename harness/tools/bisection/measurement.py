"""--metric: the number that decides, read from metrics.jsonl or a log, and what the numbers of all releases show together."""

import json
import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

from harness.tools.bisection.question import Options
from harness.tools.bisection.search import Edge
from harness.tools.bisection.state import Record, State

ALIASES = {
    "logprob_diff": "log_prob_difference_mean",
    "log_prob_diff": "log_prob_difference_mean",
    "step_seconds": "seconds",
}
"""Names that users may know -> those of metrics.jsonl."""
MOST_STEPS = 3
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"


def read_values(name: str, log: Path, folder: Path) -> list[float]:
    """Return all values of a run, in order: of any metrics.jsonl in its folder, else those that its log shows.

    The log shows NAME = 0.1, NAME: 0.1, or JSON.
    """
    names = {name, ALIASES.get(name, name)}
    written = [value for file in sorted(folder.rglob("metrics.jsonl")) for value in _of_file(file, names)]
    if written:
        return written
    either = "|".join(re.escape(each) for each in sorted(names))
    pattern = re.compile(rf"(?<![\w/.-])(?:{either})[\"']?\s*[=: ]\s*({_NUMBER})(?![\w.])", re.IGNORECASE)
    with log.open(errors="replace") as lines:
        return [float(match[1]) for line in lines for match in pattern.finditer(line)]


def compared_value(options: Options, values: list[float]) -> float | None:
    """Return the largest for --above, the smallest for --below, the median for --worse; None without any."""
    if not values:
        return None
    if any(map(math.isnan, values)):
        return math.nan
    return max(values) if options.above is not None else min(values) if options.below is not None else median(values)


def is_bad(options: Options, value: float, ratio: float | None, reference: float | None) -> bool:
    """Return whether it is beyond the limit; NaN is. reference: the good end's value, for --worse."""
    if options.above is not None:
        return not value <= options.above
    if options.below is not None:
        return not value >= options.below
    assert ratio is not None
    return reference is not None and not value <= ratio * reference


def number_of(record: Record) -> float | None:
    numbers = [attempt.value for attempt in record.attempts if attempt.value is not None]
    return median(numbers) if numbers else None


def reference(state: State) -> float | None:
    """Return the good end's number, once it is known to be good."""
    good = state.end("good")
    return number_of(state.record(good)) if good is not None and state.verdicts[good] == "good" else None


def describe_limit(state: State, edge: Edge | None) -> list[str]:
    """Return sentences on the limit, and on larger steps than the one over the limit."""
    options, base, ratio = state.question.options, reference(state), state.question.ratio
    limit = options.above if options.above is not None else options.below
    if limit is None and ratio is not None and base is not None:
        limit = ratio * base
    if state.question.kind != "metric" or limit is None:
        return []
    where = "below" if options.below is not None else "above"
    times = f", {options.worse.rstrip('x')} times the good end's {base:.6g}" if options.worse else ""
    sentences = [f"{options.metric} is bad {where} {limit:.6g}{times}."]
    steps = _steps(state)
    crossing = next((s for s in steps if edge and edge.before <= s[0] and s[1] <= edge.after), None)
    larger = sorted((s for s in steps if crossing and s[2] > crossing[2]), key=lambda s: -s[2])[:MOST_STEPS]
    if crossing and larger:
        places = "; ".join(_describe_step(state, *step[:2]) for step in sorted(larger))
        sentences.append(
            f"It changes in several steps, and larger than the one over the limit ({_describe_step(state, *crossing[:2])})"
            f" are: {places}."
        )
    return sentences


def numbers_table(state: State) -> Iterator[str]:
    if state.question.kind != "metric":
        return
    base, metric = reference(state), state.question.options.metric
    yield from (
        "## Numbers in order",
        "",
        f"| candidate | {metric} | of the good end's | verdict |",
        "|---|---|---|---|",
    )
    for index, number in sorted(_numbers(state).items()):
        share = f"{number / base:.3f}" if base else "-"
        label = state.candidates[index].label.replace("|", "/")
        yield f"| {label} | {number:.6g} | {share} | {state.verdicts[index]} |"
    yield ""


def _numbers(state: State) -> dict[int, float]:
    found = {state.index(record.name): number_of(record) for record in state.records}
    return {index: number for index, number in found.items() if number is not None}


def _steps(state: State) -> list[tuple[int, int, float]]:
    """Return neighbours among the measured ones, and how much worse the later one is; infinitely for NaN."""
    numbers, options = _numbers(state), state.question.options
    sign = (-1 if options.below is not None else 1) * (-1 if options.find_fix else 1)
    changes = ((a, b, sign * (numbers[b] - numbers[a])) for a, b in pairwise(sorted(numbers)))
    return [(a, b, math.inf if math.isnan(change) else change) for a, b, change in changes]


def _describe_step(state: State, before: int, after: int) -> str:
    low, high = (_numbers(state)[index] for index in (before, after))
    names = " to ".join(state.candidates[index].label for index in (before, after))
    share = f", {high / low - 1:+.1%}" if low and math.isfinite(high / low) else ""
    unseen = f" ({after - before - 1} between them not run)" if after - before > 1 else ""
    return f"{names}{unseen}, {low:.6g} to {high:.6g}{share}"


def _of_file(file: Path, names: set[str]) -> Iterator[float]:
    for line in file.read_text(errors="replace").splitlines():
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a run that was killed
        if isinstance(values, dict):
            yield from (float(values[name]) for name in names if isinstance(values.get(name), int | float))
