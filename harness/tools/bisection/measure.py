"""The number that decides: from metrics.jsonl, or from what the script prints."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from harness.tools.bisection.question import Options

ALIASES = {
    "logprob_diff": "log_prob_difference_mean",
    "log_prob_diff": "log_prob_difference_mean",
    "step_seconds": "seconds",
}
"""Of metrics.jsonl's names, for those who know them by another one."""
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"


def values(name: str, log: Path, folder: Path) -> list[float]:
    """All values of a run, in order: those of any metrics.jsonl in its folder, else those that its log shows as NAME = 0.1,
    NAME: 0.1, or in JSON."""
    names = {name, ALIASES.get(name, name)}
    written = [value for file in sorted(folder.rglob("metrics.jsonl")) for value in _of_file(file, names)]
    return written or list(_of_log(log, names))


def value(options: Options, found: list[float]) -> float | None:
    """What is compared: the largest for --above, the smallest for --below, the median for --worse; None without any."""
    if not found:
        return None
    if any(math.isnan(each) for each in found):
        return math.nan
    return max(found) if options.above is not None else min(found) if options.below is not None else median(found)


def is_bad(options: Options, measured: float, ratio: float | None, reference: float | None) -> bool:
    """NaN is bad. reference: the good end's value, for --worse."""
    if options.above is not None:
        return not measured <= options.above
    if options.below is not None:
        return not measured >= options.below
    assert ratio is not None
    return reference is not None and not measured <= ratio * reference


def _of_file(file: Path, names: set[str]) -> Iterator[float]:
    for line in file.read_text(errors="replace").splitlines():
        try:
            told = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a run that was killed
        yield from (
            float(told[name]) for name in names if isinstance(told, dict) and isinstance(told.get(name), int | float)
        )


def _of_log(log: Path, names: set[str]) -> Iterator[float]:
    either = "|".join(re.escape(name) for name in sorted(names))
    pattern = re.compile(rf"(?<![\w/.-])(?:{either})[\"']?\s*[=: ]\s*({_NUMBER})(?![\w.])", re.IGNORECASE)
    with log.open(errors="replace") as lines:
        yield from (float(match[1]) for line in lines for match in pattern.finditer(line))
