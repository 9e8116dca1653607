"""The record of a run: how long its start took, the metrics of its steps, memory by phase; metrics.jsonl while it runs."""

import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.runtime.units import MIB

PACKAGES = ("torch", "sglang", "transformers", "torch_memory_saver", "datasets", "accelerate")
FIGURES = ("rss", "used", "reserved", "engine", "free", "peak")

Metrics = dict[str, float]
Stages = Mapping[str, Sequence[Mapping[str, int]]]
"""What every rank read at the end of each phase of a step, by phase."""


@dataclass(kw_only=True, slots=True)
class RunRecord:
    """Collect what happened on this rank; only rank 0 writes. Times are seconds."""

    file: Path | None
    """Where metrics are appended, a JSON object a line; None on ranks other than 0."""
    launched: float
    """UNIX time of the launch."""
    startup: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of the start; first_token counts from launch."""
    steps: list[Metrics] = field(default_factory=list)
    final: Metrics = field(default_factory=dict)
    """What the check after the last update measured."""

    def __post_init__(self) -> None:
        """Count the time until now as launch and import."""
        self.startup["launch_and_import"] = time.time() - self.launched

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure one part of the start."""
        started = time.monotonic()
        yield
        self.startup[name] = time.monotonic() - started

    def add(self, metrics: Metrics, stages: Stages | None = None) -> None:
        """Keep a step's metrics, and append them and its phases' memory to the file."""
        self.steps.append(metrics)
        first = {f"startup/{name}": seconds for name, seconds in self.startup.items()} if len(self.steps) == 1 else {}
        self._append(metrics | first | stage_metrics(stages or {}))

    def finish(self, final: Metrics) -> None:
        """Keep and append the metrics of the check after the last update."""
        self.final = final
        kind = {"kind": "final_check", "final/step": len(self.steps)}
        self._append(kind | {f"final/{name}": value for name, value in final.items()})

    def startup_line(self, models_beside_engine: bool) -> str:
        """Return where the time to the first token went, for the console."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.startup.items() if name != "first_token")
        beside = "; models beside engine" if models_beside_engine else ""
        return f"first token {self.startup['first_token']:.1f} s after launch (seconds: {parts}{beside})"

    def _append(self, values: Mapping[str, Any]) -> None:
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")


def step_line(metrics: Metrics) -> str:
    """Return one step for the console."""
    parts = [
        f"step {metrics['step']:.0f}",
        f"reward {metrics['reward_mean']:.3f}",
        f"truncated {metrics['truncated_share']:.0%}",
        f"log-prob difference {metrics['log_prob_difference_mean']:.1e}",
    ]
    if "actor/loss" in metrics:  # not while the critic learns alone
        parts += [f"actor loss {metrics['actor/loss']:+.4f}", f"grad norm {metrics['actor/grad_norm']:.3f}"]
    if "critic/explained_variance" in metrics:
        parts.append(f"explained variance {metrics['critic/explained_variance']:+.3f}")
    return "  ".join([*parts, f"{metrics['seconds']:.1f} s"])


def stage_metrics(stages: Stages) -> dict[str, Any]:
    """For metrics.jsonl: each figure at the end of each phase (the largest over ranks; of free bytes the least), all
    ranks in MiB, and memory/end, what is taken at the end of the step: of the GPU, or of the host where there is none.
    """
    metrics: dict[str, Any] = {}
    compact: dict[str, dict[str, list[int]]] = {}
    for phase, ranks in stages.items():
        compact[phase] = {}
        for name in (name for name in FIGURES if name in ranks[0]):
            values = [rank[name] for rank in ranks]
            compact[phase][name] = [value // MIB for value in values]
            metrics[f"memory/{phase}/{name}"] = min(values) if name == "free" else max(values)
        if phase == "sync" and "peak" in ranks[0]:
            metrics["memory/sync/extra"] = max(rank["peak"] - rank["before"] for rank in ranks)
    for ranks in list(stages.values())[-1:]:
        metrics["memory/end"] = max(rank["total"] - rank["free"] if "total" in rank else rank["rss"] for rank in ranks)
        metrics["memory/ranks_mib"] = compact
    return metrics


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and PACKAGES, "not installed" where one is missing."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
