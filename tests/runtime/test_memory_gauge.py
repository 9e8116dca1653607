"""What the gauge reads, with and without a GPU."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch

from harness.runtime import MIB
from harness.runtime.events import EventLog
from harness.runtime.memory_gauge import MemoryGauge


def test_a_gauge_without_a_gpu_reads_host_memory_through_the_event_log(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "rank0.jsonl", 0, "here", gauge=MemoryGauge(None, None))
    with log.phase("run"), log.in_step(1), log.phase("sync"):
        with log.in_step(1), log.phase("readback"):
            pass
        with log.in_step(1), log.phase("readback"):
            pass
    assert list(log.step_phases) == [1] and log.step_phases[1]["sync"]["rss"] > 10 * MIB
    assert log.step_phases[1]["readback"]["seconds"] == sum(log.seconds["readback"]) > 0


class FakeCuda:
    """Not CUDA: a GPU of 100 bytes that counts as torch.cuda does."""

    def __init__(self) -> None:
        self.allocated, self.reserved, self.peak, self.peak_reserved, self.others = 0, 0, 0, 0, 7

    def hold(self, allocated: int) -> None:
        self.allocated = allocated
        self.reserved = max(self.reserved, allocated)
        self.peak, self.peak_reserved = max(self.peak, allocated), max(self.peak_reserved, self.reserved)

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    def memory_allocated(self, device: int) -> int:
        return self.allocated

    def memory_reserved(self, device: int) -> int:
        return self.reserved if device == 0 else 0

    def max_memory_allocated(self, device: int) -> int:
        return self.peak

    def max_memory_reserved(self, device: int) -> int:
        return self.peak_reserved

    def reset_peak_memory_stats(self, device: int) -> None:
        self.peak, self.peak_reserved = self.allocated, self.reserved

    def mem_get_info(self, device: int) -> tuple[int, int]:
        return 100 - self.memory_reserved(device) - self.others, 100


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", fake.reset_peak_memory_stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fake.mem_get_info)
    return fake


def test_the_gauge_tells_the_engine_from_the_trainer_and_nests_peaks(cuda: FakeCuda) -> None:
    cuda.hold(5)
    gauge = MemoryGauge(0, 0)
    cuda.others += 20  # an engine starts
    gauge.begin()
    cuda.hold(30)
    cuda.hold(10)
    gauge.begin()
    cuda.hold(18)
    cuda.hold(12)
    inner = gauge.end()
    gauge.begin()
    quiet = gauge.end()
    outer = gauge.end()
    assert (inner["before"], inner["peak"], inner["used"], inner["reserved"]) == (10, 18, 12, 30)
    assert (inner["engine"], inner["free"], inner["total"]) == (20, 43, 100)
    assert quiet["peak"] == quiet["before"] == 12
    assert (outer["before"], outer["peak"]) == (5, 30)
    assert inner["reserved"] + inner["engine"] + inner["free"] == 100 - 7, "all but what was there before"


def test_the_peak_of_reserved_memory_counts_when_a_phase_frees_the_cache(cuda: FakeCuda) -> None:
    gauge, of_other_gpu = MemoryGauge(0, 0), MemoryGauge(0, 1)
    gauge.begin()
    cuda.hold(30)
    cuda.hold(4)
    gauge.begin()
    cuda.empty_cache()
    inner = gauge.end()
    outer = gauge.end()
    assert (inner["reserved"], inner["peak_reserved"], outer["peak_reserved"]) == (4, 30, 30)
    cuda.others += 20  # of an engine on another GPU
    of_other_gpu.begin()
    assert of_other_gpu.end()["engine"] == 20


def test_a_phase_that_fails_and_is_caught_leaves_the_one_around_it_as_it_is(cuda: FakeCuda, tmp_path: Path) -> None:
    log = EventLog(tmp_path / "rank0.jsonl", 0, "here", gauge=MemoryGauge(0, 0))
    cuda.hold(5)
    with log.in_step(0), log.phase("generate"):
        cuda.hold(10)
        with suppress(ValueError), log.in_step(0), log.phase("validate"):
            cuda.hold(30)
            raise ValueError
    figures = log.step_phases[0]["generate"]
    assert (figures["before"], figures["peak"]) == (5, 30)
