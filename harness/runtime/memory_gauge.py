"""Memory of one rank at the end of each phase, in bytes.

On every machine: rss, the resident host memory of this process. On a GPU also:

- used, before: allocated by the trainer's tensors, now and when the phase began
- peak: the most that was allocated during the phase
- reserved, peak_reserved: the same for what torch's allocator holds, which includes what it keeps for later
- engine: what other processes hold on the engine's GPU
- free, total: of the trainer's GPU
"""

from dataclasses import dataclass, field

import psutil
import torch


@dataclass(slots=True)
class MemoryGauge:
    """Reads the memory of this process, of its GPU and of its engine's GPU. Without a device, of the process alone.

    Make it before the engine starts: memory of other processes that is taken by then does not count as the engine's.
    "engine" is an estimate, because CUDA and NCCL memory that the trainer takes later counts as the engine's.
    """

    device: int | None = None
    """The trainer's GPU."""
    engine_device: int | None = None
    """The GPU of this rank's engine rank: the same one, or another with parallel.colocate = false."""
    _elsewhere: int = 0
    _open: list[dict[str, int]] = field(default_factory=list)
    """For each phase that has begun: before, and peak and peak_reserved so far. Phases nest, and CUDA counts one peak
    only."""

    def __post_init__(self) -> None:
        if self.device is not None:
            self._elsewhere = self._not_the_trainers()

    def begin(self) -> None:
        if self.device is not None:
            self._note_peak()
            torch.cuda.reset_peak_memory_stats(self.device)
            used, reserved = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
            self._open.append({"before": used, "peak": used, "peak_reserved": reserved})

    def end(self) -> dict[str, int]:
        """Return the figures at the end of the phase that began last."""
        figures = {"rss": int(psutil.Process().memory_info().rss)}
        if self.device is None:
            return figures
        self._note_peak()
        free, total = torch.cuda.mem_get_info(self.device)
        return figures | {
            "used": torch.cuda.memory_allocated(self.device),
            "reserved": torch.cuda.memory_reserved(self.device),
            **self._open.pop(),
            "engine": max(0, self._not_the_trainers() - self._elsewhere),
            "free": free,
            "total": total,
        }

    def give_up(self) -> None:
        """Forget the phase that began last, because it failed."""
        if self._open:
            self._note_peak()
            self._open.pop()

    def _note_peak(self) -> None:
        for phase in self._open:
            phase["peak"] = max(phase["peak"], torch.cuda.max_memory_allocated(self.device))
            phase["peak_reserved"] = max(phase["peak_reserved"], torch.cuda.max_memory_reserved(self.device))

    def _not_the_trainers(self) -> int:
        """Return the bytes of the engine's GPU that are neither free nor this process's."""
        free, total = torch.cuda.mem_get_info(self.engine_device)
        return total - free - (torch.cuda.memory_reserved(self.device) if self.engine_device == self.device else 0)
