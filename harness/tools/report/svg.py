"""Drawings as SVG text: a timeline of ranks, memory of GPUs, lines over steps. Figures in, text out."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from harness.runtime.phases import phase_of_step
from harness.runtime.units import GIB
from harness.tools.report.run_history import Reading, Span

WIDTH, LEFT = 1080, 64
"""Pixels of a drawing, and of its left margin."""
GROUPS = {
    "start": ("#9aa5b1", "meet inputs import_sglang start_engine build_trainer load_baseline shutdown"),
    "release, resume": ("#8e6bbf", "first_release resume_weights resume_kv_cache release free_caches"),
    "sync": ("#2f6fb7", "sync"),
    "generate": ("#e08a3c", "generate validate"),
    "verify": ("#d9b72b", "find_suspects readback bench"),
    "log-probs, values": ("#2a9d8f", "old_log_probs reference_log_probs values advantages"),
    "update": ("#5b9f3c", "update_actor update_critic"),
}
FAILED, OTHER = "#c62828", "#6b7785"
LAYERS = {"used": "#2f6fb7", "reserved": "#a9c4e6", "engine": "#e08a3c", "free": "var(--panel)", "rss": "#2f6fb7"}
LINES = ("#2f6fb7", "#e08a3c", "#5b9f3c", "#8e6bbf")
SMALLEST = 0.3
"""Pixels of the shortest phase that is drawn: thousands of slivers are megabytes."""
MOST_LABELS = 60
CHARACTER = 6.6
"""Pixels that a digit of a label takes at most."""


def timeline(spans: Sequence[Span], ranks: Sequence[int], start: float, end: float, culprits: Sequence[int]) -> str:
    """Draw a row for each rank, seconds to the right; phases inside others lower over them. culprits: names in red."""
    row, pitch, top = (24, 28, 22) if len(ranks) <= 16 else (10, 12, 22)
    scale = (WIDTH - LEFT - 10) / max(end - start, 1e-3)
    height = top + len(ranks) * pitch + 8
    parts = [_open(WIDTH, height, "phases of every rank")]
    for second in ticks(start, end):
        x = LEFT + (second - start) * scale
        parts += [_line(x, 16, x, height - 6), _text(x, 12, f"{second:g} s", "middle")]
    tops = {rank: top + index * pitch for index, rank in enumerate(ranks)}
    for index, (rank, y) in enumerate(tops.items()):
        if row > 10 or index % 4 == 0 or rank in culprits:
            shade = ' class="bad" font-weight="700"' if rank in culprits else ""
            parts.append(_text(LEFT - 6, y + row / 2 + 4, f"rank {rank}", "end", shade))
        parts.append(_rect(LEFT, y, (end - start) * scale, row, 'class="row"'))
    for span in spans:
        begin, stop = max(span.start, start), min(span.end, end)
        wide = (stop - begin) * scale
        if wide < 0 or (wide < SMALLEST and span.outcome == "ended"):
            continue
        inset = min(span.depth, 2) * row * 0.3
        fill = f'fill="{FAILED if span.outcome == "failed" else color(span.phase)}"'
        dashed = ' stroke="#c62828" stroke-width="1.5" stroke-dasharray="4 2"' if span.outcome == "open" else ""
        ending = {"ended": "", "failed": ", FAILED", "open": ", did not end"}[span.outcome]
        seconds = f"{span.start:.2f} s to {span.end:.2f} s ({span.end - span.start:.3f} s){ending}"
        name = f"<title>rank {span.rank}: {escape(phase_of_step(span.phase, span.step))}, {seconds}</title>"
        at = (LEFT + (begin - start) * scale, tops[span.rank] + inset)
        parts.append(f"<g>{name}{_rect(*at, max(wide, 0.7), row - inset, fill + dashed)}</g>")
    return "\n".join([*parts, "</svg>"])


def color(phase: str) -> str:
    """Return the color of a phase's group."""
    if phase.startswith("verify_"):
        return GROUPS["verify"][0]
    return next((shade for shade, phases in GROUPS.values() if phase in phases.split()), OTHER)


def memory(readings: Sequence[Reading], title: str, wide: int, tall: int, full: int, names: bool) -> str:
    """Draw a GPU's memory, or a process's, as steps over its phases: what is stacked adds up to the GPU.

    full: bytes of the whole height. names: whether columns have their phase below, and steps a line where they begin.
    """
    left, above, below = (52, 24, 150) if names else (4, 20, 4)
    each, base = (wide - left - 6) / max(1, len(readings)), tall + above
    parts = [_open(wide, base + below, title, crisp=True), _text(left, 13, title, more=' class="title"')]
    for share in (0, 0.5, 1) if names else ():
        y = base - tall * share
        parts += [_line(left, y, wide, y), _text(left - 4, y + 4, f"{full * share / GIB:.3g}", "end")]
    for index, reading in enumerate(readings):
        x, y, column = left + index * each, float(base), stack(reading.figures)
        phase = phase_of_step(reading.phase, reading.step)
        figures = ", ".join(f"{name} {size / GIB:.2f}" for name, size in column.items())
        parts.append(f"<g><title>{escape(phase)}, GiB: {figures}</title>")
        for name, size in column.items():
            y -= tall * size / full
            parts.append(_rect(x, y, each + 0.3, tall * size / full, f'fill="{LAYERS[name]}"'))
        parts.append("</g>")
        if names and index and reading.step != readings[index - 1].step:
            parts.append(_line(x, 20, x, base, 'class="step" stroke-dasharray="3 3"'))
        if names and index % math.ceil(len(readings) / MOST_LABELS) == 0:
            turned = f' transform="translate({x + each / 2 + 3:.1f},{base + 6}) rotate(-60)"'
            parts.append(_text(0, 0, phase, "end", turned))
    return "\n".join([*parts, "</svg>"])


def stack(figures: Mapping[str, int]) -> dict[str, int]:
    """Return what to stack, bottom first, so that the sum is the GPU; without a GPU, the process's host memory.

    Where the engine has a GPU of its own, it takes what this one has left at most.
    """
    if "free" not in figures:
        return {"rss": figures.get("rss", 0)}
    total = figures.get("total", figures["reserved"] + figures["engine"] + figures["free"])
    used, reserved = figures["used"], max(0, figures["reserved"] - figures["used"])
    engine = min(figures["engine"], max(0, total - used - reserved))
    return {"used": used, "reserved": reserved, "engine": engine, "free": max(0, total - used - reserved - engine)}


def lines(
    series: Mapping[str, Sequence[float]],
    title: str,
    wide: int = 350,
    tall: int = 130,
    log: bool = False,
    limits: Mapping[str, float] | None = None,
    unit: str = "step",
    steps: Sequence[int] = (),
) -> str:
    """Draw values over steps: these, or all from step 0; what is not finite is left out. limits: dashed lines by name."""
    scaled = _log if log else float
    shown = {name: [scaled(value) for value in values] for name, values in series.items()}
    dashed = {name: scaled(value) for name, value in (limits or {}).items()}
    flat = [value for values in (*shown.values(), dashed.values()) for value in values if math.isfinite(value)]
    heading = f"{title} (logarithmic)" if log else title
    parts = [_open(wide, tall + 46, heading), _text(4, 13, heading, more=' class="title"')]
    if not flat:
        return "\n".join([*parts, _text(60, 60, "no values"), "</svg>"])
    low, high = min(flat), max(flat)
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = low - (0.5 * abs(low) or 1.0), high + (0.5 * abs(high) or 1.0)
    at_labels = [low + (high - low) * share for share in (0, 0.5, 1)]
    labels = axis_labels([10**value if log else value for value in at_labels])
    left, top, right = 8 + CHARACTER * max(map(len, labels)), 22, wide - 8
    steps = steps or range(max(map(len, shown.values())))

    def y(value: float) -> float:
        return top + (high - value) / (high - low) * tall

    for value, label in zip(at_labels, labels, strict=True):
        parts += [_line(left, y(value), right, y(value)), _text(left - 4, y(value) + 4, label, "end")]
    for name, value in dashed.items():
        parts.append(_line(left, y(value), right, y(value), 'class="limit"'))
        parts.append(_text(right, max(y(value) - 4, top + 12), name, "end", ' class="bad"'))
    for index, (name, values) in enumerate(shown.items()):
        stroke = LINES[index % len(LINES)]
        shade = f'fill="{stroke}"'
        wide_step = (right - left) / max(1, steps[-1] - steps[0])
        placed = zip(steps, values, strict=False)
        points = [(left + wide_step * (step - steps[0]), y(value)) for step, value in placed if math.isfinite(value)]
        path = " ".join(f"{x:.1f},{at:.1f}" for x, at in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="1.8"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{at:.1f}" r="2.4" {shade}/>' for x, at in points if len(steps) <= 60]
        if len(shown) > 1:
            x = left + 90 * index
            parts += [_rect(x, tall + 32, 10, 8, shade), _text(x + 14, tall + 40, name)]
    return "\n".join([*parts, _text(right, tall + 40, f"{unit} {steps[0]} to {steps[-1]}", "end"), "</svg>"])


def axis_labels(values: Sequence[float]) -> list[str]:
    """Return the values in as few digits, two or more, as tell them apart."""
    tries = ([f"{value:.{digits}g}" for value in values] for digits in range(2, 18))
    return next((labels for labels in tries if len(set(labels)) == len(set(values))), [])


def ticks(start: float, end: float, most: int = 10) -> list[float]:
    """Return round seconds from start to end, at most so many."""
    rough = max(end - start, 1e-3) / most
    unit = 10 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
    return [round(step * index, 6) for index in range(math.ceil(start / step), math.floor(end / step) + 1)]


def _log(value: float) -> float:
    return math.log10(value) if value > 0 and math.isfinite(value) else math.nan


def _open(wide: int, tall: float, title: str, crisp: bool = False) -> str:
    """Open the drawing. crisp: rectangles that touch show no seam between them."""
    edges = ' shape-rendering="crispEdges"' if crisp else ""
    size = f'width="{wide}" height="{tall:.0f}" viewBox="0 0 {wide} {tall:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}"{edges}>'


def _rect(x: float, y: float, wide: float, tall: float, more: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" {more}/>'


def _line(x: float, y: float, to_x: float, to_y: float, more: str = 'class="grid"') -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" {more}/>'


def _text(x: float, y: float, text: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
