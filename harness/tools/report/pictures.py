"""The pictures of report.html: what each rank did, and curves of the metrics.

matplotlib draws them as SVG inside the page: no script and no other file, text that is escaped and can be searched, and
the same bytes for the same run.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from io import StringIO
from typing import TYPE_CHECKING, Any

from harness.tools.export.subject import RunEnd
from harness.tools.report.timeline import WRONG, timeline
from harness.tools.report.trace import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CHARTS = (
    ("reward_mean", "Reward", "mean reward", False),
    ("actor/loss", "Loss of the actor", "loss", False),
    ("critic/loss", "Loss of the critic", "loss", False),
    ("log_prob_difference_mean", "Log-probs, engine against trainer", "mean difference (nats)", True),
    ("response_tokens_mean", "Length of responses", "mean tokens", True),
)
"""Of each chart: the metric, its title, what is on the vertical axis, and whether that begins at 0."""
COLUMNS = 3
MOST_POINTS = 60
"""Steps up to which each value has a point of its own; beyond it they are a line."""
LARGEST = 1e300
"""Beyond it, the difference of two values is no longer a number."""


def pictures_of(events: Sequence[Event], seen: RunEnd | None, metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the pictures that a run has, as HTML. events: of all ranks, by time. metrics: rows of metrics.jsonl.

    An environment that others made may lack matplotlib. Then the page says so instead.
    """
    if find_spec("matplotlib") is None:
        return ["<p>The pictures need matplotlib, which is not installed here: pip install matplotlib</p>"]
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Text stays text, and a "$" in it begins no formula; the salt makes the names in the SVG the same every time.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "report", "text.parse_math": False, "font.size": 9}):
        figures = [Figure(), Figure()]
        timeline(figures[0], events, seen)
        curves(figures[1], metrics)
        return [as_svg(figure) for figure in figures if figure.axes]


def as_svg(figure: "Figure") -> str:
    """Return a figure as an SVG element, without a date."""
    text = StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return text.getvalue()[text.getvalue().index("<svg") :]


def curves(figure: "Figure", metrics: Sequence[Mapping[str, Any]]) -> None:
    """Draw a chart of each of CHARTS that any step has."""
    rows = sorted((row for row in metrics if "step" in row), key=lambda row: float(row["step"]))
    charts = [each for each in CHARTS if any(each[0] in row for row in rows)]
    lines = -(-len(charts) // COLUMNS) or 1
    inches = 0.3 + 2.6 * lines
    figure.set_size_inches(13, inches)
    figure.subplots_adjust(left=0.06, right=0.99, top=1 - 0.4 / inches, bottom=0.5 / inches, wspace=0.25, hspace=0.5)
    for place, (name, title, label, from_zero) in enumerate(charts, 1):
        axes = figure.add_subplot(lines, COLUMNS, place, title=title, xlabel="step", ylabel=label)
        draw_curve(axes, {float(row["step"]): number_or_none(row.get(name)) for row in rows})
        if from_zero:
            axes.axhline(0, alpha=0)


def draw_curve(axes: "Axes", values: Mapping[float, float | None]) -> None:
    """Draw a value of each step. One that is missing, or not a number, breaks the line and has a red cross."""
    steps, each = list(values), list(values.values())
    alone = [
        at for at in range(len(each)) if each[max(0, at - 1) : at] + each[at + 1 : at + 2] in ([], [None], [None] * 2)
    ]
    drawn = [float("nan") if value is None else value for value in each]
    points = None if len(steps) <= MOST_POINTS else alone
    axes.plot(steps, drawn, marker="o", markersize=4, markevery=points, color="#1a56a8")
    missing = [step for step in steps if values[step] is None]
    if missing:
        at_the_bottom = axes.get_xaxis_transform()
        axes.plot(
            missing, [0.04] * len(missing), "x", color=WRONG, transform=at_the_bottom, label="no value, or no number"
        )
        axes.legend(frameon=False)
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    axes.grid(alpha=0.3)


def number_or_none(value: Any) -> float | None:
    """Return a value as one that can be drawn."""
    return float(value) if isinstance(value, int | float) and abs(value) < LARGEST else None
