"""metrics.jsonl: a row for each step, with seconds, throughput and memory of its phases; and how long the start
took.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.runtime import MIB
from harness.runtime.events import unix_seconds

SUMMARIZED = ("log_prob_difference_", "sync_", "seconds/verify_")
"""Prefixes of the metrics that stay in memory for the verdict and the report. A run may be long: the file has the
others."""
FIGURES = ("rss", "used", "reserved", "engine", "free", "peak", "peak_reserved")

Metrics = dict[str, float]
Phases = Mapping[str, Sequence[Mapping[str, float]]]
"""Phase of a step -> its seconds and memory on every rank."""


@dataclass(kw_only=True, slots=True)
class RunRecord:
    """Collects the metrics of a run. All ranks have one, and only rank 0's writes the file. Times are in seconds."""

    file: Path | None
    """Rows are appended here, one JSON object on each line; None on ranks other than 0."""
    launched: float
    """UNIX time of the launch."""
    startup: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of the start; first_token counts from launch."""
    steps: list[Metrics] = field(default_factory=list)
    """The SUMMARIZED metrics of each step."""
    final: Metrics = field(default_factory=dict)
    """The metrics of the final check."""

    def __post_init__(self) -> None:
        """Count the time until now as launch and import."""
        self.startup["launch_and_import"] = unix_seconds() - self.launched

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure one part of the start."""
        started = time.monotonic()
        yield
        self.startup[name] = time.monotonic() - started

    def add(self, metrics: Metrics, phases: Phases, tokens: Mapping[str, float]) -> dict[str, Any]:
        """Append a step's metrics to the file, with the throughput and memory of its phases. Return the row.

        tokens: phase -> tokens that all ranks computed in it, and "step" for the whole step.
        """
        row = metrics | phase_seconds(phases)
        self.steps.append({sys.intern(name): value for name, value in row.items() if name.startswith(SUMMARIZED)})
        first = {f"startup/{name}": seconds for name, seconds in self.startup.items()} if len(self.steps) == 1 else {}
        return self._append(
            {"kind": "step"} | row | first | throughput(tokens, metrics["seconds"], phases) | memory(phases)
        )

    def add_validation(self, updates: int, found: Metrics) -> dict[str, Any]:
        """Append and return the metrics of the validation after so many updates; names begin with validation/."""
        values = {"step": updates} | found
        return self._append({"kind": "validation"} | {f"validation/{name}": value for name, value in values.items()})

    def finish(self, final: Metrics, phases: Phases) -> dict[str, Any]:
        """Keep, append and return the metrics of the final check; names begin with final/."""
        self.final = final | phase_seconds(phases)
        values = self.final | memory(phases)
        return self._append({"kind": "final_check"} | {f"final/{name}": value for name, value in values.items()})

    def startup_line(self, models_beside_engine: bool) -> str:
        """Return where the time to the first token went, for the console."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.startup.items() if name != "first_token")
        meanwhile = "; models were built meanwhile" if models_beside_engine else ""
        return f"first token {self.startup['first_token']:.1f} s after launch (seconds: {parts}{meanwhile})"

    def _append(self, row: dict[str, Any]) -> dict[str, Any]:
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return row


def step_line(metrics: Metrics, notes: Sequence[str] = ()) -> str:
    """Return one step for the console. notes: what a reader must know of it besides its metrics."""
    forms = {
        "step": "step {:.0f}",
        "reward_mean": "reward {:.3f}",
        "truncated_share": "truncated {:.0%}",
        "speculation/accept_length": "accept length {:.2f}",
        "log_prob_difference_mean": "log-prob difference {:.1e}",
        "actor/loss": "actor loss {:+.4f}",
        "actor/grad_norm": "grad norm {:.3f}",
        "critic/explained_variance": "explained variance {:+.3f}",
        "seconds": "{:.1f} s",
    }
    return "  ".join([*(form.format(metrics[name]) for name, form in forms.items() if name in metrics), *notes])


def phase_seconds(phases: Phases) -> Metrics:
    """Return seconds/PHASE, as rank 0 took them."""
    return {f"seconds/{phase}": ranks[0]["seconds"] for phase, ranks in phases.items()}


def throughput(tokens: Mapping[str, float], step_seconds: float, phases: Phases) -> Metrics:
    """Return tokens_per_second/PHASE: tokens of all ranks over the slowest rank's seconds; and
    tokens_per_second/step.
    """
    seconds = {phase: max(each["seconds"] for each in ranks) for phase, ranks in phases.items()} | {
        "step": step_seconds
    }
    return {f"tokens_per_second/{name}": each / seconds[name] for name, each in tokens.items() if name in seconds}


def memory(phases: Phases) -> dict[str, Any]:
    """Return the memory figures of a step, in bytes.

    memory/PHASE/FIGURE is the largest over the ranks at the end of the phase (for "free": the smallest). memory/max_*
    is the largest of all phases. memory/end is what is in use at the end of the step, on the GPU, or on a host without
    one. memory/ranks_mib has every rank's figures in MiB.
    """
    metrics: dict[str, Any] = {}
    compact: dict[str, dict[str, list[int]]] = {}
    for phase, ranks in phases.items():
        compact[phase] = {}
        for name in (name for name in FIGURES if name in ranks[0]):
            values = [rank[name] for rank in ranks]
            compact[phase][name] = [int(value) // MIB for value in values]
            metrics[f"memory/{phase}/{name}"] = min(values) if name == "free" else max(values)
        if phase == "sync" and "peak" in ranks[0]:
            metrics["memory/sync/extra"] = max(rank["peak"] - rank["before"] for rank in ranks)
    for name, figure in (("allocated", "peak"), ("reserved", "peak_reserved"), ("rss", "rss")):
        most = [rank[figure] for ranks in phases.values() for rank in ranks if figure in rank]
        metrics |= {f"memory/max_{name}": max(most)} if most else {}
    for ranks in list(phases.values())[-1:]:
        metrics["memory/end"] = max(rank["total"] - rank["free"] if "total" in rank else rank["rss"] for rank in ranks)
        metrics["memory/ranks_mib"] = compact
    return metrics
