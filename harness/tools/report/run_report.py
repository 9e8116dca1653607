"""What a run leaves for a reader: metrics.jsonl while it goes on, report.md at its end, a verdict on the console."""

import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.cluster.mesh import ParallelDims
from harness.cluster.picture import picture_of
from harness.cluster.world import World
from harness.config.layers import to_toml
from harness.config.schema import Config
from harness.runtime.memory_gauge import MIB, Stage, bars, stage_metrics, steady_sentence

PACKAGES = ("torch", "sglang", "transformers", "torch_memory_saver", "datasets", "accelerate")

Metrics = dict[str, float]


@dataclass(kw_only=True, slots=True)
class Report:
    """Collects what happened; only rank 0 writes. Times are seconds."""

    folder: Path
    config: Config
    world: World
    launched: float
    """UNIX time of the launch."""
    startup: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of the start; first_token counts from launch."""
    steps: list[Metrics] = field(default_factory=list)
    final: Metrics = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)
    """Memory at the end of every phase of every step."""
    verification: list[str] = field(default_factory=list)
    """Markdown lines on how the syncs were checked."""

    def __post_init__(self) -> None:
        self.startup["launch_and_import"] = time.time() - self.launched

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure one part of the start."""
        started = time.monotonic()
        yield
        self.startup[name] = time.monotonic() - started

    def add(self, metrics: Metrics, stages: Sequence[Stage] = ()) -> None:
        """Keep a step's metrics and its phases' memory; rank 0 appends both to metrics.jsonl."""
        self.steps.append(metrics)
        self.stages.extend(stages)
        startup = self._startup_metrics() if len(self.steps) == 1 else {}
        self._append(metrics | startup | stage_metrics(stages))

    def finish(self, final: Metrics) -> None:
        """Keep what the check after the last update saw."""
        self.final = final
        kind = {"kind": "final_check", "final/step": len(self.steps)}
        self._append(kind | {f"final/{name}": value for name, value in final.items()})

    def startup_line(self) -> str:
        """Where the time to the first token went."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.startup.items() if name != "first_token")
        beside = "; models beside engine" if self.world.device.type == "cpu" else ""
        return f"first token {self.startup['first_token']:.1f} s after launch (seconds: {parts}{beside})"

    def step_line(self, metrics: Metrics) -> str:
        """One step on the console."""
        parts = [
            f"step {metrics['step']:.0f}",
            f"reward {metrics['reward_mean']:.3f}",
            f"truncated {metrics['truncated_share']:.0%}",
            f"log-prob difference {metrics['log_prob_difference_mean']:.1e}",
            f"actor loss {metrics['actor/loss']:+.4f}",
            f"grad norm {metrics['actor/grad_norm']:.3f}",
        ]
        if "critic/explained_variance" in metrics:
            parts.append(f"explained variance {metrics['critic/explained_variance']:+.3f}")
        return "  ".join([*parts, f"{metrics['seconds']:.1f} s"])

    def verdict(self, proof: str) -> str:
        """The run's last line; proof says what is known of its syncs."""
        return f"PASSED: {len(self.steps)} PPO steps; {proof}; open {self.folder}/report.html"

    def write(self) -> None:
        """Write report.md; harness/reporting makes of it, and of the run's other files, what a reader gets."""
        (self.folder / "report.md").write_text(self.markdown(), encoding="utf-8")

    def markdown(self) -> str:
        """The report: verdict first, then the curve, the steps, the start, the environment, the config."""
        parallel = self.config.parallel
        lines = [
            f"# PPO on sglang: {self.config.model.name}, dp {parallel.dp} tp {parallel.tp} pp {parallel.pp}",
            "",
            f"PASSED, {len(self.steps)} steps, {self.world.world_size} ranks on {len(self.world.hosts)} host(s),"
            f" {self.world.device.type}.",
            "",
            "## Mean reward by step",
            "",
            "```",
            *curve([step["reward_mean"] for step in self.steps]),
            "```",
            "",
            "## Steps",
            "",
            *self._table(),
            "",
            f"After the last update the weights were sent once more: mean log-prob difference {self.final['log_prob_difference_mean']:.2g}.",
            "",
            "## Verification",
            "",
            *self.verification,
            "",
            *self._memory(),
            "## Where it ran",
            "",
            "```",
            *picture_of(self.world, ParallelDims.of(self.config.parallel)),
            "```",
            "",
            "## Start-up",
            "",
            *[f"- {name}: {seconds:.1f} s" for name, seconds in self.startup.items()],
            "",
            "## Environment",
            "",
            *[f"- {name} {version}" for name, version in installed_versions().items()],
            "",
            "## Config",
            "",
            "```toml",
            to_toml(self.config).rstrip(),
            "```",
            "",
        ]
        return "\n".join(lines)

    def _memory(self) -> list[str]:
        """What the phases of the last step left in memory, the peak of its sync, and whether memory grows."""
        if not self.stages:
            return []
        by_step: dict[int, list[Stage]] = {}
        for stage in self.stages:
            by_step.setdefault(stage.step, []).append(stage)
        metrics = [stage_metrics(stages) for stages in by_step.values()]
        lines = [f"At the end of each phase of step {max(by_step)}, of the rank with most taken:", "", "```"]
        lines += [*bars(by_step[max(by_step)]), "```", ""]
        if extra := [each["memory/sync/extra"] for each in metrics if "memory/sync/extra" in each]:
            lines += [f"Peak extra memory of a sync: {max(extra) / MIB:.0f} MiB on a GPU (the trainer's side).", ""]
        ends = [each["memory/end"] for each in metrics if "total" in self.stages[0].ranks[0]]  # a host's is not steady
        if sentence := steady_sentence(ends):
            lines += [sentence, ""]
        return ["## Memory", "", *lines]

    def _table(self) -> list[str]:
        columns = ["step", "reward_mean", "log_prob_difference_mean", "actor/loss", "actor/grad_norm", "actor/entropy"]
        if "critic/explained_variance" in self.steps[0]:
            columns += ["critic/loss", "critic/explained_variance"]
        columns.append("seconds")
        rows = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        return rows + ["| " + " | ".join(f"{step[name]:.4g}" for name in columns) + " |" for step in self.steps]

    def _startup_metrics(self) -> Metrics:
        return {f"startup/{name}": seconds for name, seconds in self.startup.items()}

    def _append(self, values: Mapping[str, Any]) -> None:
        if self.world.rank == 0:
            with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")


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


def installed_versions() -> dict[str, str]:
    """Versions of what matters here, "not installed" where it is not."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
