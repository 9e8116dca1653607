"""Drawings as SVG text: a timeline of ranks, memory of GPUs, lines over steps. Figures in, text out."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from harness.runtime.units import GIB
from harness.tools.report.run_history import Reading, Span

WIDTH, LEFT = 1080, 64
"""Pixels of a drawing, and of its left margin."""
GROUPS = {
    "start": (
        "#9aa5b1",
        ("meet", "inputs", "import_sglang", "start_engine", "build_trainer", "load_baseline", "shutdown"),
    ),
    "release, resume": ("#8e6bbf", ("first_release", "resume_weights", "resume_kv_cache", "release", "free_caches")),
    "sync": ("#2f6fb7", ("sync",)),
    "generate": ("#e08a3c", ("generate",)),
    "verify": ("#d9b72b", ("find_suspects", "readback", "bench")),
    "log-probs, values": ("#2a9d8f", ("old_log_probs", "reference_log_probs", "values", "advantages")),
    "update": ("#5b9f3c", ("update_actor", "update_critic")),
}
FAILED = "#c62828"
OTHER = "#6b7785"
LAYERS = {"used": "#2f6fb7", "reserved": "#a9c4e6", "engine": "#e08a3c", "free": "var(--panel)", "rss": "#2f6fb7"}
LINES = ("#2f6fb7", "#e08a3c", "#5b9f3c", "#8e6bbf")
SMALLEST = 0.3
"""Pixels of the shortest phase that is drawn: thousands of slivers are megabytes."""
MOST_LABELS = 60
STEP_LABEL = 44
"""Pixels that the label of a step takes."""
CHARACTER = 6.6
"""Pixels that a digit of a label takes at most."""


def color(phase: str) -> str:
    """Return the color of a phase's group."""
    if phase.startswith("verify_"):
        return GROUPS["verify"][0]
    return next((shade for shade, phases in GROUPS.values() if phase in phases), OTHER)


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colors (#rrggbb) as WCAG has it, 1 to 21."""
    light = sorted((_luminance(one), _luminance(other)))
    return (light[1] + 0.05) / (light[0] + 0.05)


def ink(fill: str) -> str:
    """Return black or white, whichever can be read better on this color."""
    return max("#000000", "#ffffff", key=lambda shade: contrast(shade, fill))


def _luminance(shade: str) -> float:
    parts = [int(shade[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def timeline(spans: Sequence[Span], ranks: Sequence[int], start: float, end: float, culprits: Sequence[int]) -> str:
    """Draw a row for each rank, seconds to the right; phases inside others lower over them. culprits: in red."""
    row = 26 if len(ranks) <= 8 else 18 if len(ranks) <= 16 else 10
    gap = 4 if row > 10 else 2
    length = max(end - start, 1e-3)
    scale = (WIDTH - LEFT - 10) / length
    top = 22
    height = top + len(ranks) * (row + gap) + 8
    parts = [_open(WIDTH, height, "phases of every rank")]
    for second in ticks(start, end):
        x = LEFT + (second - start) * scale
        parts.append(f'<line x1="{x:.1f}" y1="16" x2="{x:.1f}" y2="{height - 6}" class="grid"/>')
        parts.append(f'<text x="{x:.1f}" y="12" text-anchor="middle">{second:g} s</text>')
    for index, rank in enumerate(ranks):
        y = float(top + index * (row + gap))
        if row > 10 or index % 4 == 0 or rank in culprits:
            shade = ' class="bad" font-weight="700"' if rank in culprits else ""
            middle = y + row - (row - 9) / 2
            parts.append(f'<text x="{LEFT - 6}" y="{middle:.1f}" text-anchor="end"{shade}>rank {rank}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{length * scale:.1f}" height="{row}" class="row"/>')
    where = {rank: index for index, rank in enumerate(ranks)}
    for span in spans:
        if span.rank not in where or span.end < start or span.start > end:
            continue
        begin, stop = max(span.start, start), min(span.end, end)
        if (stop - begin) * scale < SMALLEST and span.outcome == "ended":
            continue
        x, wide = LEFT + (begin - start) * scale, max((stop - begin) * scale, 0.7)
        inset = min(span.depth, 2) * row * 0.3
        y = top + where[span.rank] * (row + gap) + inset
        fill = FAILED if span.outcome == "failed" else color(span.phase)
        dashed = ' stroke="#c62828" stroke-width="1.5" stroke-dasharray="4 2"' if span.outcome == "open" else ""
        name = span.phase if span.step is None else f"{span.phase} of step {span.step}"
        ending = "" if span.outcome == "ended" else f", {'FAILED' if span.outcome == 'failed' else 'did not end'}"
        parts.append(
            f"<g><title>rank {span.rank}: {escape(name)}, {span.start:.2f} s to {span.end:.2f} s"
            f" ({span.end - span.start:.3f} s){ending}</title>"
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{row - inset:.1f}" fill="{fill}"{dashed}/>'
        )
        if row > 10 and wide > 7 * len(span.phase) + 6 and span.depth == 0:
            parts.append(
                f'<text x="{x + 4:.1f}" y="{y + row / 2 + 4:.1f}" fill="{ink(fill)}">{escape(span.phase)}</text>'
            )
        parts.append("</g>")
    for rank in set(culprits) & set(where):
        edge = top + where[rank] * (row + gap) - 1
        parts.append(
            f'<rect x="{LEFT}" y="{edge}" width="{length * scale:.1f}" height="{row + 2}" fill="none" stroke="{FAILED}"/>'
        )
    return "\n".join([*parts, "</svg>"])


def memory(readings: Sequence[Reading], title: str, wide: int, tall: int, full: int, names: bool) -> str:
    """Draw a GPU's memory, or a process's, as steps over its phases: what is stacked adds up to the GPU.

    full: bytes of the whole height. names: whether each column has its phase below, and steps are marked.
    """
    left, above, bottom = (52, 36, 118) if names else (4, 20, 4)
    columns = [stack(reading.figures) for reading in readings]
    each = (wide - left - 6) / max(1, len(columns))
    base = tall + above
    parts = [
        _open(wide, base + bottom, title, crisp=True),
        f'<text x="{left}" y="13" class="title">{escape(title)}</text>',
    ]
    if names:
        for share in (0, 0.5, 1):
            y = base - tall * share
            parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{wide}" y2="{y:.1f}" class="grid"/>')
            parts.append(f'<text x="{left - 4}" y="{y + 4:.1f}" text-anchor="end">{full * share / GIB:.3g}</text>')
    for index, (reading, column) in enumerate(zip(readings, columns, strict=True)):
        x, y = left + index * each, float(base)
        figures = ", ".join(f"{name} {size / GIB:.2f}" for name, size in column.items())
        step = "" if reading.step is None else f" of step {reading.step}"
        parts.append(f"<g><title>{escape(reading.phase)}{step}, GiB: {figures}</title>")
        for name, size in column.items():
            high = tall * size / full
            y -= high
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{each + 0.3:.1f}" height="{high:.1f}" fill="{LAYERS[name]}"/>'
            )
        parts.append("</g>")
    if names:
        parts += _marks(readings, left, each, base)
    return "\n".join([*parts, "</svg>"])


def _marks(readings: Sequence[Reading], left: float, each: float, base: float) -> list[str]:
    """Mark where each step begins, and the phase of each column; of very many columns some."""
    parts = []
    before, labelled = None, max(1, math.ceil(len(readings) / MOST_LABELS))
    last = -math.inf
    for index, reading in enumerate(readings):
        x = left + index * each
        if reading.step is not None and reading.step != before:
            before = reading.step
            parts.append(f'<line x1="{x:.1f}" y1="20" x2="{x:.1f}" y2="{base}" class="step" stroke-dasharray="3 3"/>')
            fits = x + STEP_LABEL < left + each * len(readings)
            if x - last > (STEP_LABEL if fits else 2 * STEP_LABEL):  # one that does not fit stands on the other side
                last = x
                at, anchor = (x + 3, "start") if fits else (x - 3, "end")
                parts.append(
                    f'<text x="{at:.1f}" y="29" text-anchor="{anchor}" class="mark">step {reading.step}</text>'
                )
        if index % labelled == 0:
            parts.append(
                f'<text transform="translate({x + each / 2 + 3:.1f},{base + 6}) rotate(-60)" text-anchor="end">'
                f"{escape(reading.phase)}</text>"
            )
    return parts


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


def taken(column: Mapping[str, int]) -> int:
    """Return the sum of a stack without what is free."""
    return sum(size for name, size in column.items() if name != "free")


def lines(
    series: Mapping[str, Sequence[float]],
    title: str,
    wide: int = 350,
    tall: int = 130,
    log: bool = False,
    limits: Mapping[str, float] | None = None,
    guides: Mapping[str, float] | None = None,
    unit: str = "step",
) -> str:
    """Draw values over steps, from step 0; what is not finite is left out.

    limits, guides: values of dashed lines by name; a limit stands out. unit: what is counted to the right.
    """
    scaled = _log if log else float
    shown = {name: [scaled(value) for value in values] for name, values in series.items()}
    dashed = {name: scaled(value) for name, value in {**(guides or {}), **(limits or {})}.items()}
    flat = [value for values in (*shown.values(), dashed.values()) for value in values if math.isfinite(value)]
    heading = f"{title} (logarithmic)" if log else title
    parts = [_open(wide, tall + 46, heading), f'<text x="4" y="13" class="title">{escape(heading)}</text>']
    if not flat:
        return "\n".join([*parts, '<text x="60" y="60">no values</text></svg>'])
    low, high = min(flat), max(flat)
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = low - (0.5 * abs(low) or 1.0), high + (0.5 * abs(high) or 1.0)
    at_labels = [low + (high - low) * share for share in (0, 0.5, 1)]
    labels = axis_labels([10**value if log else value for value in at_labels])
    left, top, right = 8 + CHARACTER * max(map(len, labels)), 22, wide - 8
    most = max((len(values) for values in shown.values()), default=1)

    def y(value: float) -> float:
        return top + (high - value) / (high - low) * tall

    for value, label in zip(at_labels, labels, strict=True):
        parts.append(f'<line x1="{left:.1f}" y1="{y(value):.1f}" x2="{right}" y2="{y(value):.1f}" class="grid"/>')
        parts.append(f'<text x="{left - 4:.1f}" y="{y(value) + 4:.1f}" text-anchor="end">{label}</text>')
    for name, value in dashed.items():
        if not math.isfinite(value):
            continue
        at = y(value)
        line, text = ("limit", "bad") if name in (limits or {}) else ("guide", "note")
        parts.append(f'<line x1="{left:.1f}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" class="{line}"/>')
        below = at + 12 if at < top + 14 else at - 4
        parts.append(f'<text x="{right}" y="{below:.1f}" text-anchor="end" class="{text}">{escape(name)}</text>')
    for index, (name, values) in enumerate(shown.items()):
        shade = LINES[index % len(LINES)]
        points = [
            (left + (right - left) * place / max(1, most - 1), y(value))
            for place, value in enumerate(values)
            if math.isfinite(value)
        ]
        path = " ".join(f"{x:.1f},{at:.1f}" for x, at in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{shade}" stroke-width="1.8"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{at:.1f}" r="2.4" fill="{shade}"/>' for x, at in points if most <= 60]
        if len(shown) > 1:
            x = left + 90 * index
            parts.append(f'<rect x="{x:.1f}" y="{tall + 32}" width="10" height="8" fill="{shade}"/>')
            parts.append(f'<text x="{x + 14:.1f}" y="{tall + 40}">{escape(name)}</text>')
    parts.append(f'<text x="{right}" y="{tall + 40}" text-anchor="end">{unit} 0 to {most - 1}</text>')
    return "\n".join([*parts, "</svg>"])


def axis_labels(values: Sequence[float]) -> list[str]:
    """Return the values in as few digits, two or more, as tell them apart."""
    for digits in range(2, 17):
        labels = [f"{value:.{digits}g}" for value in values]
        if len(set(labels)) == len(set(values)):
            break
    return labels


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
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{tall:.0f}" viewBox="0 0 {wide} {tall:.0f}"'
        f' role="img" aria-label="{escape(title, quote=True)}"{edges}>'
    )
