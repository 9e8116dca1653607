"""Where memory was: a gauge that each phase reads at its end, and what ranks read, side by side, as metrics and plots.

Figures are bytes. On a GPU: used (the trainer's tensors), reserved (what torch's allocator holds, used included), peak
(most used since the phase began), before (used when it began), engine (all that is neither free nor this process's),
free, total. On every machine: rss, this process's resident host memory.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import psutil
import torch

from harness.cluster.world import all_gather
from harness.runtime.events import PhaseMemory

GIB, MIB = 1 << 30, 1 << 20
SHOWN = ("used", "reserved", "engine", "free")
"""The figures that add up to a GPU, once what is used is taken from what is reserved."""
MARKS = {"used": "u", "reserved": "r", "engine": "e", "free": ".", "rss": "#"}

Reader = Callable[[], dict[str, int]]


@dataclass(slots=True)
class Gauge:
    """Memory of this process, its GPU and its engine's GPU; without a device, of the process alone."""

    device: int | None
    """The trainer's GPU."""
    engine_device: int | None
    """The GPU of this rank's engine rank: the same, or one of its own."""
    _elsewhere: int = 0
    _before: list[int] = field(default_factory=list)
    _peaks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Must come before there is an engine: what is taken on the engine's GPU by now is not the engine's. It is an
        estimate: what CUDA and NCCL take for the trainer later counts as the engine's."""
        if self.device is not None and self.engine_device is not None:
            reserved = torch.cuda.memory_reserved(self.device) if self.engine_device == self.device else 0
            free, total = torch.cuda.mem_get_info(self.engine_device)
            self._elsewhere = total - free - reserved

    def begin(self) -> None:
        """A phase begins. Phases nest: the peak of an outer one has those of its inner ones in it."""
        if self.device is None:
            return
        if self._peaks:
            self._peaks[-1] = max(self._peaks[-1], torch.cuda.max_memory_allocated(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)
        self._before.append(torch.cuda.memory_allocated(self.device))
        self._peaks.append(0)

    def end(self) -> dict[str, int]:
        """The figures at the end of the phase that began last."""
        figures = {"rss": int(psutil.Process().memory_info().rss)}
        if self.device is None or self.engine_device is None:
            return figures
        peak = max(self._peaks.pop(), torch.cuda.max_memory_allocated(self.device))
        if self._peaks:
            self._peaks[-1] = max(self._peaks[-1], peak)
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        engine_free, engine_total = torch.cuda.mem_get_info(self.engine_device)
        own = self._elsewhere + (reserved if self.engine_device == self.device else 0)
        return figures | {
            "used": torch.cuda.memory_allocated(self.device),
            "reserved": reserved,
            "peak": peak,
            "before": self._before.pop(),
            "engine": max(0, engine_total - engine_free - own),
            "free": free,
            "total": total,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """What every rank read at the end of one phase of a step."""

    phase: str
    step: int
    ranks: tuple[Mapping[str, int], ...]

    def most(self, figure: str) -> int:
        """The largest over ranks."""
        return max(rank[figure] for rank in self.ranks)


def gather_stages(memory: Iterable[PhaseMemory], step: int) -> list[Stage]:
    """The phases of one step, in order, with the readings of all ranks; a collective call of all ranks."""
    mine = {each.phase: each.figures for each in memory if each.step == step}
    everyone: list[dict[str, Mapping[str, int]]] = all_gather(mine)
    shared = [phase for phase in mine if all(phase in other for other in everyone)]
    return [Stage(phase=phase, step=step, ranks=tuple(other[phase] for other in everyone)) for phase in shared]


def stage_metrics(stages: Sequence[Stage]) -> dict[str, Any]:
    """For metrics.jsonl: each figure at the end of each phase (the largest over ranks; of free bytes the least), all
    ranks in MiB, and memory/end, what is taken at the end of the step: of the GPU, or of the host where there is none."""
    metrics: dict[str, Any] = {}
    compact: dict[str, dict[str, list[int]]] = {}
    for stage in stages:
        figures = [name for name in ("rss", *SHOWN, "peak") if name in stage.ranks[0]]
        compact[stage.phase] = {name: [rank[name] // MIB for rank in stage.ranks] for name in figures}
        for name in figures:
            values = [rank[name] for rank in stage.ranks]
            metrics[f"memory/{stage.phase}/{name}"] = min(values) if name == "free" else max(values)
        if stage.phase == "sync" and "peak" in figures:
            metrics["memory/sync/extra"] = max(rank["peak"] - rank["before"] for rank in stage.ranks)
    if stages:
        metrics["memory/end"] = max(taken(rank) for rank in stages[-1].ranks)
        metrics["memory/ranks_mib"] = compact
    return metrics


def taken(figures: Mapping[str, int]) -> int:
    """Bytes of the GPU that are not free, whoever has them; without a GPU, the process's host memory."""
    return figures["total"] - figures["free"] if "total" in figures else figures["rss"]


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
