"""Per-phase memory of one rank. Figures are bytes.

On a GPU: used (the trainer's tensors), reserved (what torch's allocator keeps, used included), peak (most used since the
phase began), peak_reserved (the same of what is reserved), before (used when it began), engine (all that is neither free
nor this process's), free, total. On every machine: rss, this process's resident host memory.
"""

from dataclasses import dataclass, field

import psutil
import torch


@dataclass(slots=True)
class MemoryGauge:
    """Memory of this process, its GPU and its engine's GPU; without a device, of the process alone.

    Made before there is an engine: what is taken on the engine's GPU by then is not the engine's. It is an estimate: what
    CUDA and NCCL take for the trainer later counts as the engine's.
    """

    device: int | None
    """The trainer's GPU."""
    engine_device: int | None
    """The GPU of this rank's engine rank: the same, or one of its own."""
    _elsewhere: int = 0
    _open: list[list[int]] = field(default_factory=list)
    """Bytes used before each phase that has begun, most used and most reserved since; phases nest."""

    def __post_init__(self) -> None:
        if self.device is not None:
            self._elsewhere = self._not_the_trainers()

    def begin(self) -> None:
        """Note the start of a phase."""
        if self.device is not None:
            self._note_peak()
            torch.cuda.reset_peak_memory_stats(self.device)
            used = torch.cuda.memory_allocated(self.device)
            self._open.append([used, used, torch.cuda.memory_reserved(self.device)])

    def end(self) -> dict[str, int]:
        """Return the figures at the end of the phase that began last."""
        figures = {"rss": int(psutil.Process().memory_info().rss)}
        if self.device is None:
            return figures
        self._note_peak()
        before, peak, peak_reserved = self._open.pop()
        free, total = torch.cuda.mem_get_info(self.device)
        return figures | {
            "used": torch.cuda.memory_allocated(self.device),
            "reserved": torch.cuda.memory_reserved(self.device),
            "peak": peak,
            "peak_reserved": peak_reserved,
            "before": before,
            "engine": max(0, self._not_the_trainers() - self._elsewhere),
            "free": free,
            "total": total,
        }

    def _note_peak(self) -> None:
        for each in self._open:
            each[1] = max(each[1], torch.cuda.max_memory_allocated(self.device))
            each[2] = max(each[2], torch.cuda.max_memory_reserved(self.device))

    def _not_the_trainers(self) -> int:
        """Bytes of the engine's GPU that are neither free nor this process's."""
        free, total = torch.cuda.mem_get_info(self.engine_device)
        return total - free - (torch.cuda.memory_reserved(self.device) if self.engine_device == self.device else 0)
