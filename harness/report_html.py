"""report.html: what report.md says, with the memory of every rank drawn; one file that needs no other."""

from collections.abc import Sequence

from harness.report_page import page
from harness.timeline import GIB, Stage, layers

COLORS = {"used": "#3b6fb5", "reserved": "#a9c4e6", "engine": "#e08a3c", "free": "#eeeeee", "rss": "#3b6fb5"}
MOST_RANKS, MOST_STEPS = 16, 6
BAR, HEIGHT, LABELS = 18, 160, 130  # pixels


def html(markdown: str, stages: Sequence[Stage]) -> str:
    """The whole page. stages: all of the run, in order; of a long run the first and the last steps are drawn."""
    return page(markdown, drawings(stages))


def drawings(stages: Sequence[Stage]) -> list[str]:
    """An SVG for each rank, of the first 16: a column for each phase, its memory stacked."""
    steps = list(dict.fromkeys(stage.step for stage in stages))
    if len(steps) > MOST_STEPS:
        steps = [*steps[: MOST_STEPS // 2], *steps[-MOST_STEPS // 2 :]]
    shown = [stage for stage in stages if stage.step in steps]
    return [svg(shown, rank) for rank in range(min(MOST_RANKS, len(shown[0].ranks) if shown else 0))]


def svg(stages: Sequence[Stage], rank: int) -> str:
    """Memory of one rank at the end of each phase, used at the bottom; the height is the largest column's bytes."""
    columns = [layers(stage.ranks[rank]) for stage in stages]
    full = max(sum(column.values()) for column in columns) or 1
    width, total = max(420, BAR * len(stages) + 10), HEIGHT + LABELS
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{total + 25}" font-family="sans-serif" font-size="11">',
        f'<text x="0" y="12" font-size="13">rank {rank}: full height {full / GIB:.2f} GiB</text>',
    ]
    for index, name in enumerate(columns[0]):
        parts.append(f'<rect x="{190 + 58 * index}" y="3" width="10" height="10" fill="{COLORS[name]}"/>')
        parts.append(f'<text x="{203 + 58 * index}" y="12">{name}</text>')
    for index, (stage, column) in enumerate(zip(stages, columns, strict=True)):
        left, bottom = BAR * index, HEIGHT + 20.0
        figures = ", ".join(f"{name} {size / GIB:.2f}" for name, size in column.items())
        parts.append(f"<g><title>step {stage.step} {stage.phase}, GiB: {figures}</title>")
        for name, size in column.items():
            tall = HEIGHT * size / full
            bottom -= tall
            parts.append(
                f'<rect x="{left}" y="{bottom:.1f}" width="{BAR - 3}" height="{tall:.1f}" fill="{COLORS[name]}"/>'
            )
        label = f"{stage.step} {stage.phase}"
        parts.append(f'<text transform="translate({left + 3},{HEIGHT + 26}) rotate(65)">{label}</text></g>')
    return "\n".join([*parts, "</svg>"])
