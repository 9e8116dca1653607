"""The sections of report.md that a run which passed has: curve, steps, verification, memory, start-up; from its files."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from harness.runtime.units import GIB, MIB
from harness.tools.report.svg import stack, taken

MARKS = {"used": "u", "reserved": "r", "engine": "e", "free": ".", "rss": "#"}
COLUMNS = (
    "step", "reward_mean", "log_prob_difference_mean", "actor/loss", "actor/grad_norm", "actor/entropy", "critic/loss",
    "critic/explained_variance", "seconds",
)  # fmt: skip

Metrics = Mapping[str, Any]


def run_sections(metrics: Sequence[Metrics], events: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return Markdown. metrics: the lines of metrics.jsonl; events: of all ranks. Empty for a job without steps."""
    steps = [each for each in metrics if "step" in each]
    final = next((each for each in metrics if each.get("kind") == "final_check"), None)
    if not steps or final is None:
        return []
    verification: list[str] = next((each["lines"] for each in events if each["event"] == "verification"), [])
    startup = {name: value for name, value in steps[0].items() if name.startswith("startup/")}
    return [
        *("## Mean reward by step", "", "```", *curve([step["reward_mean"] for step in steps]), "```", ""),
        *("## Steps", "", *_table(steps), ""),
        "After the last update the weights were sent once more: mean log-prob difference"
        f" {final['final/log_prob_difference_mean']:.2g}.",
        "",
        *("## Verification", "", *verification, ""),
        *_memory(steps),
        *("## Start-up", ""),
        *[f"- {name.partition('/')[2]}: {seconds:.1f} s" for name, seconds in startup.items()],
        "",
    ]


def _table(steps: Sequence[Metrics]) -> list[str]:
    columns = [name for name in COLUMNS if name in steps[0]]
    rows = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return rows + ["| " + " | ".join(f"{step[name]:.4g}" for name in columns) + " |" for step in steps]


def _memory(steps: Sequence[Metrics]) -> list[str]:
    """Return the memory after each phase of the last step, the peak of its syncs, and whether memory grows."""
    last: Mapping[str, Mapping[str, Sequence[int]]] = steps[-1].get("memory/ranks_mib", {})
    if not last:
        return []
    lines = [f"At the end of each phase of step {steps[-1]['step']:.0f}, of the rank with most taken:", ""]
    lines += ["```", *bars(last), "```", ""]
    if extra := [each["memory/sync/extra"] for each in steps if "memory/sync/extra" in each]:
        lines += [f"Peak extra memory of a sync: {max(extra) / MIB:.0f} MiB on a GPU (the trainer's side).", ""]
    on_gpu = "free" in next(iter(last.values()))  # the memory of a host is not steady
    if on_gpu and (sentence := steady_sentence([each["memory/end"] for each in steps])):
        lines += [sentence, ""]
    return ["## Memory", "", *lines]


def curve(values: Sequence[float], height: int = 10, width: int = 60) -> list[str]:
    """Return a plot in text: one column a bin of values, the axis from 0 (or the least value) to 1 (or the largest).

    Of values that are all the same return a sentence: a plot of zeros is an empty frame.
    """
    if len(set(values)) == 1:
        return [f"{values[0]:.4g} in each step, 0 to {len(values) - 1}"]
    low, high = min(0.0, *values), max(1.0, *values)
    bins = min(width, len(values))
    means = []
    for index in range(bins):
        part = values[index * len(values) // bins : (index + 1) * len(values) // bins]
        means.append(sum(part) / len(part))
    rows = []
    for level in range(height, 0, -1):
        edge = low + (high - low) * (level - 0.5) / height
        label = f"{low + (high - low) * level / height:5.2f} |"
        rows.append(label + "".join("#" if mean >= edge else " " for mean in means).rstrip())
    return [*rows, "      +" + "-" * bins, f"       step 0 to {len(values) - 1}"]


def steady(values: Sequence[float], after: int = 3, within: float = 0.01) -> bool:
    """Return whether each value from the after-th on (counted from 1) is within that share of the after-th, above or below.

    Raise ValueError where there is nothing after it to compare.
    """
    if len(values) <= after:
        raise ValueError(f"{len(values)} values: steady(after={after}) needs more than {after}")
    first = values[after - 1]
    return all(abs(value - first) <= within * abs(first) for value in values[after:])


def steady_sentence(ends: Sequence[float], after: int = 3, within: float = 0.01) -> str | None:
    """Return whether memory at the end of each step grows; None for too few steps."""
    if len(ends) <= after:
        return None
    change = (ends[-1] - ends[after - 1]) / ends[after - 1]
    verdict = "steady" if steady(ends, after, within) else "NOT steady"
    return (
        f"Memory after a step is {verdict}: {ends[-1] / GIB:.3f} GiB after step {len(ends)}, {ends[after - 1] / GIB:.3f} GiB"
        f" after step {after} ({change:+.2%}; allowed at every step between: {within:.0%})."
    )


def bars(phases: Mapping[str, Mapping[str, Sequence[int]]], width: int = 60) -> list[str]:
    """Return a text plot of one step: a line for each phase, a bar of the rank that has most taken in it.

    phases: name -> figure -> MiB of each rank.
    """
    worst = {}
    for phase, figures in phases.items():
        stacks = [stack(dict(zip(figures, of_rank, strict=True))) for of_rank in zip(*figures.values(), strict=True)]
        worst[phase] = max(stacks, key=taken)
    full = max(sum(column.values()) for column in worst.values())
    name_width = max(map(len, worst))
    rows = []
    for phase, column in worst.items():
        edges = [0]
        for size in column.values():
            edges.append(edges[-1] + size)
        cells = [round(edge / full * width) for edge in edges]
        bar = "".join(MARKS[name] * (end - start) for name, (start, end) in zip(column, pairwise(cells), strict=True))
        rows.append(f"{phase:<{name_width}} |{bar:<{width}}| {taken(column) * MIB / GIB:7.2f} GiB")
    legend = "  ".join(f"{MARKS[name]} {name}" for name in next(iter(worst.values())))
    return [*rows, f"{'':<{name_width}}  {legend}; full width {full * MIB / GIB:.2f} GiB"]
