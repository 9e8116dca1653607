"""report.md of a run that passed: verdict first, then the curve, the steps, memory, where it ran, the config."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from harness.cluster.picture import picture_of
from harness.config.run_folder import CONFIG
from harness.runtime.observer import RunContext
from harness.runtime.run_record import RunRecord, Stage, installed_versions, stage_metrics, taken
from harness.runtime.units import GIB, MIB

MARKS = {"used": "u", "reserved": "r", "engine": "e", "free": ".", "rss": "#"}


@dataclass(frozen=True, slots=True)
class PassedRun:
    """The sections of report.md that a run's record has."""

    run: RunContext
    record: RunRecord

    def markdown(self) -> str:
        """The report: verdict first, then the curve, the steps, the start, the environment, the config."""
        parallel = self.run.config.parallel
        lines = [
            f"# PPO on sglang: {self.run.config.model.name}, dp {parallel.dp} tp {parallel.tp} pp {parallel.pp}",
            "",
            f"PASSED, {len(self.record.steps)} steps, {self.run.world.world_size} ranks on {len(self.run.world.hosts)} host(s),"
            f" {self.run.world.device.type}.",
            "",
            "## Mean reward by step",
            "",
            "```",
            *curve([step["reward_mean"] for step in self.record.steps]),
            "```",
            "",
            "## Steps",
            "",
            *self._table(),
            "",
            f"After the last update the weights were sent once more: mean log-prob difference {self.record.final['log_prob_difference_mean']:.2g}.",
            "",
            "## Verification",
            "",
            *self.record.verification,
            "",
            *self._memory(),
            "## Where it ran",
            "",
            "```",
            *picture_of(self.run.world, self.run.dims),
            "```",
            "",
            "## Start-up",
            "",
            *[f"- {name}: {seconds:.1f} s" for name, seconds in self.record.startup.items()],
            "",
            "## Environment",
            "",
            *[f"- {name} {version}" for name, version in installed_versions().items()],
            "",
            "## Config",
            "",
            "```toml",
            (self.run.folder / CONFIG).read_text(encoding="utf-8").rstrip(),
            "```",
            "",
        ]
        return "\n".join(lines)

    def _memory(self) -> list[str]:
        """What the phases of the last step left in memory, the peak of its sync, and whether memory grows."""
        if not self.record.stages:
            return []
        by_step: dict[int, list[Stage]] = {}
        for stage in self.record.stages:
            by_step.setdefault(stage.step, []).append(stage)
        metrics = [stage_metrics(stages) for stages in by_step.values()]
        lines = [f"At the end of each phase of step {max(by_step)}, of the rank with most taken:", "", "```"]
        lines += [*bars(by_step[max(by_step)]), "```", ""]
        if extra := [each["memory/sync/extra"] for each in metrics if "memory/sync/extra" in each]:
            lines += [f"Peak extra memory of a sync: {max(extra) / MIB:.0f} MiB on a GPU (the trainer's side).", ""]
        ends = [
            each["memory/end"] for each in metrics if "total" in self.record.stages[0].ranks[0]
        ]  # a host's is not steady
        if sentence := steady_sentence(ends):
            lines += [sentence, ""]
        return ["## Memory", "", *lines]

    def _table(self) -> list[str]:
        columns = ["step", "reward_mean", "log_prob_difference_mean", "actor/loss", "actor/grad_norm", "actor/entropy"]
        if "critic/explained_variance" in self.record.steps[0]:
            columns += ["critic/loss", "critic/explained_variance"]
        columns.append("seconds")
        rows = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        return rows + ["| " + " | ".join(f"{step[name]:.4g}" for name in columns) + " |" for step in self.record.steps]


def curve(values: Sequence[float], height: int = 10, width: int = 60) -> list[str]:
    """A plot in text: one column a bin of values, the axis from 0 (or the least value) to 1 (or the largest).

    Of values that are all the same, a sentence: a plot of zeros is an empty frame.
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
    """Whether each value from the after-th on (counted from 1) is within that share of the after-th, above or below.

    Raises ValueError where there is nothing after it to compare.
    """
    if len(values) <= after:
        raise ValueError(f"{len(values)} values: steady(after={after}) needs more than {after}")
    first = values[after - 1]
    return all(abs(value - first) <= within * abs(first) for value in values[after:])


def steady_sentence(ends: Sequence[float], after: int = 3, within: float = 0.01) -> str | None:
    """What the memory at the end of each step says of leaks; None for too few steps."""
    if len(ends) <= after:
        return None
    change = (ends[-1] - ends[after - 1]) / ends[after - 1]
    verdict = "steady" if steady(ends, after, within) else "NOT steady"
    return (
        f"Memory after a step is {verdict}: {ends[-1] / GIB:.3f} GiB after step {len(ends)}, {ends[after - 1] / GIB:.3f} GiB"
        f" after step {after} ({change:+.2%}; allowed at every step between: {within:.0%})."
    )


def layers(figures: Mapping[str, int]) -> dict[str, int]:
    """What to stack in a plot, bottom first, so that the sum is the GPU: reserved is without used. Without a GPU: rss.

    Where the engine has a GPU of its own, or the GPU other users, engine is on top of what this GPU has.
    """
    if "total" not in figures:
        return {"rss": figures["rss"]}
    return {
        "used": figures["used"],
        "reserved": figures["reserved"] - figures["used"],
        "engine": figures["engine"],
        "free": figures["free"],
    }


def bars(stages: Sequence[Stage], width: int = 60) -> list[str]:
    """A text plot of one step: a line for each phase, a bar of the rank that has most taken in it."""
    if not stages:
        return []
    worst = [max(stage.ranks, key=taken) for stage in stages]
    full = max(sum(layers(figures).values()) for figures in worst)
    name_width = max(len(stage.phase) for stage in stages)
    rows = []
    for stage, figures in zip(stages, worst, strict=True):
        edges, names = [0], list(layers(figures))
        for size in layers(figures).values():
            edges.append(edges[-1] + size)
        cells = [round(edge / full * width) for edge in edges]
        bar = "".join(MARKS[name] * (end - start) for name, (start, end) in zip(names, pairwise(cells), strict=True))
        rows.append(f"{stage.phase:<{name_width}} |{bar:<{width}}| {taken(figures) / GIB:7.2f} GiB")
    legend = "  ".join(f"{MARKS[name]} {name}" for name in layers(worst[0]))
    return [*rows, f"{'':<{name_width}}  {legend}; full width {full / GIB:.2f} GiB"]
