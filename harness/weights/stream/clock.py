"""Where the time of a sync goes, on both ends of it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class SegmentTimer:
    """Seconds by name: of the wall, and on CUDA also of the GPU's own time, as gpu_NAME."""

    device: torch.device
    wall: dict[str, float] = field(default_factory=dict)
    marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """The time in here is added to `name`, unless it ends in an exception."""
        started, start = time.perf_counter(), self._mark()
        yield
        self.wall[name] = self.wall.get(name, 0.0) + time.perf_counter() - started
        end = self._mark()
        if start and end:
            self.marks.append((name, start, end))

    def read(self) -> dict[str, float]:
        """Waits for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        seconds = dict(self.wall)
        for name, start, end in self.marks:
            seconds[f"gpu_{name}"] = seconds.get(f"gpu_{name}", 0.0) + start.elapsed_time(end) / 1e3
        return seconds

    def _mark(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
