"""What the gauge's readings become: metrics, a verdict on leaks, and plots."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.runtime.events import EventLog
from harness.runtime.memory_gauge import (
    GIB,
    MIB,
    Gauge,
    Stage,
    bars,
    layers,
    stage_metrics,
    steady,
    steady_sentence,
    taken,
)


def on_gpu(used: int, engine: int, peak: int = 0) -> dict[str, int]:
    """A GPU of 100 GiB; all in GiB."""
    figures = {"rss": 2, "used": used, "reserved": used + 5, "peak": peak, "before": 3, "engine": engine}
    return {name: size * GIB for name, size in (figures | {"free": 95 - used - engine, "total": 100}).items()}


STAGES = [
    Stage(phase="resume_weights", step=2, ranks=(on_gpu(10, 20), on_gpu(11, 20))),
    Stage(phase="sync", step=2, ranks=(on_gpu(10, 20, peak=14), on_gpu(12, 20, peak=13))),
    Stage(phase="release", step=2, ranks=(on_gpu(4, 1), on_gpu(5, 2))),
]
ON_CPU = [Stage(phase="sync", step=0, ranks=({"rss": 3 * GIB}, {"rss": 2 * GIB}))]


def test_metrics_have_the_worst_rank_all_ranks_and_the_end() -> None:
    metrics = stage_metrics(STAGES)
    assert metrics["memory/sync/used"] == 12 * GIB and metrics["memory/sync/free"] == 63 * GIB
    assert metrics["memory/sync/extra"] == 11 * GIB
    assert metrics["memory/end"] == 12 * GIB
    assert metrics["memory/ranks_mib"]["sync"]["used"] == [10 * 1024, 12 * 1024]
    assert list(metrics["memory/ranks_mib"]) == ["resume_weights", "sync", "release"]


def test_metrics_of_a_cpu_are_the_host_memory() -> None:
    assert stage_metrics(ON_CPU) == {
        "memory/sync/rss": 3 * GIB,
        "memory/end": 3 * GIB,
        "memory/ranks_mib": {"sync": {"rss": [3072, 2048]}},
    }
    assert stage_metrics([]) == {}


def test_layers_add_up_to_the_gpu() -> None:
    for stage in STAGES:
        for rank in stage.ranks:
            assert sum(layers(rank).values()) == rank["total"]
            assert taken(rank) == sum(layers(rank).values()) - layers(rank)["free"]


@pytest.mark.parametrize(
    ("values", "is_steady"),
    [
        ([5, 7, 100, 101, 99], True),
        ([100, 100, 100, 100, 101.5], False),
        ([100, 100, 100, 98.5, 100], False),
        ([0, 0, 100, 102, 100], False),
    ],
)
def test_steady_compares_with_the_third_step(values: list[float], is_steady: bool) -> None:
    assert steady(values) is is_steady


def test_steady_needs_something_to_compare() -> None:
    with pytest.raises(ValueError, match=r"3 values: steady\(after=3\) needs more than 3"):
        steady([1, 1, 1])


@given(base=st.floats(1, 1e12), changes=st.lists(st.floats(-0.0099, 0.0099), min_size=4, max_size=20))
def test_steady_within_the_share(base: float, changes: list[float]) -> None:
    values = [base, base, base, *(base * (1 + change) for change in changes)]
    assert steady(values)
    assert not steady([*values, base * 1.011])


def test_the_sentence_on_leaks() -> None:
    assert steady_sentence([GIB] * 3) is None
    assert steady_sentence([GIB] * 4) == (
        "Memory after a step is steady: 1.000 GiB after step 4, 1.000 GiB after step 3 (+0.00%; allowed at every step"
        " between: 1%)."
    )
    assert "NOT steady: 2.000 GiB after step 4" in (steady_sentence([GIB, GIB, GIB, 2 * GIB]) or "")


def test_bars_show_the_worst_rank_of_each_phase() -> None:
    rows = bars(STAGES, width=100)
    assert rows[1] == f"sync         |{'u' * 12}{'r' * 5}{'e' * 20}{'.' * 63}|   37.00 GiB"
    assert rows[-1].strip() == "u used  r reserved  e engine  . free; full width 100.00 GiB"
    assert bars([]) == []
    assert bars(ON_CPU, width=10)[0] == "sync |##########|    3.00 GiB"


def test_a_gauge_without_a_gpu_reads_host_memory_through_the_event_log(tmp_path: Path) -> None:
    gauge = Gauge(None, None)
    log = EventLog(
        tmp_path / "rank0.jsonl", 0, "here", None, gauge.end, phase_begins=[lambda name, step: gauge.begin()]
    )
    with log.phase("run"), log.phase("sync", 1):
        pass
    assert [(each.phase, each.step) for each in log.phase_memory] == [("sync", 1)]
    assert log.phase_memory[0].figures["rss"] > 10 * MIB


class FakeCuda:
    """Not CUDA: a GPU of 100 bytes that counts as torch.cuda does."""

    def __init__(self) -> None:
        self.allocated, self.reserved, self.peak, self.others = 0, 0, 0, 7

    def hold(self, allocated: int) -> None:
        self.allocated = allocated
        self.reserved = max(self.reserved, allocated)
        self.peak = max(self.peak, allocated)

    def memory_allocated(self, device: int) -> int:
        return self.allocated

    def memory_reserved(self, device: int) -> int:
        return self.reserved if device == 0 else 0

    def max_memory_allocated(self, device: int) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: int) -> None:
        self.peak = self.allocated

    def mem_get_info(self, device: int) -> tuple[int, int]:
        return 100 - self.memory_reserved(device) - self.others, 100


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in (
        "memory_allocated",
        "memory_reserved",
        "max_memory_allocated",
        "reset_peak_memory_stats",
        "mem_get_info",
    ):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def test_the_gauge_tells_the_engine_from_the_trainer_and_nests_peaks(cuda: FakeCuda) -> None:
    cuda.hold(5)
    gauge = Gauge(0, 0)
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
    assert sum(layers(inner).values()) == 100 - 7, "all but what was there before"


def test_the_gauge_reads_an_engine_on_a_gpu_of_its_own(cuda: FakeCuda) -> None:
    gauge = Gauge(0, 1)
    cuda.hold(10)
    cuda.others += 20
    gauge.begin()
    assert gauge.end()["engine"] == 20
