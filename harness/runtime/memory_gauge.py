"""Per-phase memory of one rank. Figures are bytes.

On a GPU: used (the trainer's tensors), reserved (what torch's allocator keeps, used included), peak (most used since the
phase began), before (used when it began), engine (all that is neither free nor this process's), free, total. On every
machine: rss, this process's resident host memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil
import torch


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Hold bytes by name at the end of a phase."""

    phase: str
    step: int | None
    figures: Mapping[str, int]


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
        estimate: what CUDA and NCCL take for the trainer later counts as the engine's.
        """
        if self.device is not None and self.engine_device is not None:
            reserved = torch.cuda.memory_reserved(self.device) if self.engine_device == self.device else 0
            free, total = torch.cuda.mem_get_info(self.engine_device)
            self._elsewhere = total - free - reserved

    def begin(self) -> None:
        """Note the start of a phase. Phases nest: the peak of an outer one has those of its inner ones in it."""
        if self.device is None:
            return
        if self._peaks:
            self._peaks[-1] = max(self._peaks[-1], torch.cuda.max_memory_allocated(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)
        self._before.append(torch.cuda.memory_allocated(self.device))
        self._peaks.append(0)

    def end(self) -> dict[str, int]:
        """Return the figures at the end of the phase that began last."""
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
