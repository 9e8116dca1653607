"""A line chart of one metric by step, as numbers of pixels; page.html.jinja draws them as SVG.

A step whose value is missing, NaN or infinite breaks the line and has a mark on the axis of steps, so that it is not
taken for a zero.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

WIDTH, HEIGHT = 384, 204
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 38
"""The margins of a chart: room for the labels of its axes."""
MOST_POINTS = 60
"""Steps up to which each value has a point of its own; beyond it they are a line."""
MOST_TICKS = 5
CHARTS = (
    ("reward_mean", "Reward", "mean reward", False),
    ("actor/loss", "Loss of the actor", "loss", False),
    ("critic/loss", "Loss of the critic", "loss", False),
    ("log_prob_difference_mean", "Log-probs, engine against trainer", "mean difference (nats)", True),
    ("response_tokens_mean", "Length of responses", "mean tokens", True),
)
"""Of each chart: the metric, its title, what is on the vertical axis, and whether that begins at 0."""
LARGEST = 1e300
"""Beyond it, the difference of two values is no longer a number."""


@dataclass(frozen=True)
class LineChart:
    """One metric. values: step -> its value; None where there is none, or one that cannot be drawn."""

    title: str
    axis: str  # what is on the vertical one
    values: Mapping[float, float | None]
    from_zero: bool  # whether the vertical axis begins at 0 at the latest

    @cached_property
    def drawn(self) -> dict[float, float]:
        """Return the values that can be drawn."""
        return {step: value for step, value in self.values.items() if value is not None}

    @cached_property
    def _bounds(self) -> tuple[float, float]:
        """Return the ends of the vertical axis."""
        if not self.drawn:
            return 0.0, 1.0
        low, high = min(self.drawn.values()), max(self.drawn.values())
        if self.from_zero:
            low, high = min(low, 0.0), max(high, 0.0)
        room = (high - low) * 0.08
        if room < 1e-12 * max(abs(low), abs(high), LARGEST**-0.9):  # a single value, or the same one at each step
            room = abs(high) / 2 or 1.0
        return low - room * (low != 0 or not self.from_zero), high + room

    def x(self, step: float) -> float:
        """Return where a step is; a single one is in the middle."""
        first, last = min(self.values), max(self.values)
        share = (step - first) / (last - first) if last > first else 0.5
        return round(LEFT + 8 + share * (WIDTH - LEFT - RIGHT - 16), 1)

    def y(self, value: float) -> float:
        """Return where a value is."""
        low, high = self._bounds
        return round(HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    def lines(self) -> Iterator[str]:
        """Yield the points of each line that no missing value breaks, as SVG's polyline has them."""
        for is_drawn, steps in groupby(self.values, key=lambda step: step in self.drawn):
            if is_drawn:
                yield " ".join(f"{self.x(step)},{self.y(self.drawn[step])}" for step in steps)

    def points(self) -> Iterator[tuple[float, float, str]]:
        """Yield x, y and title of each point: of all in a short run, in a long one of those between missing values."""
        steps = list(self.values)
        for before, step, after in zip([None, *steps], steps, [*steps[1:], None], strict=False):
            is_alone = before not in self.drawn and after not in self.drawn
            if step in self.drawn and (len(steps) <= MOST_POINTS or is_alone):
                value = self.drawn[step]
                yield self.x(step), self.y(value), f"step {step:g}: {value:.4g}"

    def missing(self) -> Iterator[tuple[float, str]]:
        """Yield x and title of each step without a value."""
        for step in self.values:
            if step not in self.drawn:
                yield self.x(step), f"step {step:g}: no value"

    def step_ticks(self) -> list[tuple[float, str]]:
        """Return x and label of some steps."""
        return [(self.x(step), f"{step:g}") for step in ticks(min(self.values), max(self.values), least=1.0)]

    def value_ticks(self) -> list[tuple[float, str]]:
        """Return y and label of some values; none where no step has one."""
        return [(self.y(value), f"{value + 0.0:.4g}") for value in ticks(*self._bounds) if self.drawn]


def charts_of(metrics: Sequence[Mapping[str, Any]]) -> list[LineChart]:
    """Return a chart of each of CHARTS that any step has. metrics: the rows of metrics.jsonl."""
    rows = sorted((row for row in metrics if "step" in row), key=lambda row: float(row["step"]))
    return [
        LineChart(
            title=title,
            axis=axis,
            values={float(row["step"]): number_or_none(row.get(name)) for row in rows},
            from_zero=from_zero,
        )
        for name, title, axis, from_zero in CHARTS
        if any(name in row for row in rows)
    ]


def number_or_none(value: Any) -> float | None:
    """Return a value as one that can be drawn."""
    return float(value) if isinstance(value, int | float) and abs(value) < LARGEST else None


def ticks(low: float, high: float, least: float = 0.0, most: int = MOST_TICKS) -> list[float]:
    """Return at most `most` round numbers from low to high, at least `least` apart; low if there is no room."""
    if high <= low:
        return [low]
    apart = (high - low) / (most - 1)
    unit = 10.0 ** math.floor(math.log10(apart))
    apart = max(least, next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= apart * 0.999))
    return [count * apart for count in range(math.ceil(low / apart), math.floor(high / apart) + 1)]
