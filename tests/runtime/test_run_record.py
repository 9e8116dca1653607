"""The record of a run: metrics.jsonl, the lines of the console, memory by phase."""

import json
import time
from pathlib import Path

from harness.runtime import GIB
from harness.runtime.run_record import Metrics, RunRecord, memory, step_line

STEP = {
    "reward_mean": 0.25, "truncated_share": 0.5, "log_prob_difference_mean": 2.5e-6, "actor/loss": -0.125, "actor/grad_norm": 0.5,
    "actor/entropy": 4.75, "seconds": 1.5,
}  # fmt: skip
CRITIC = {"critic/loss": 0.75, "critic/explained_variance": -0.5}


TOKENS = {"generate": 20, "update_actor": 90, "update_critic": 90, "step": 90}
PHASES = {
    "generate": [{"seconds": 0.5, "rss": 3}, {"seconds": 0.8, "rss": 1}],
    "verify_readback": [{"seconds": 0.125, "rss": 2}, {"seconds": 0.25, "rss": 2}],
    "update_actor": [{"seconds": 0.25, "rss": 2}, {"seconds": 0.125, "rss": 2}],
}
"""Two ranks; there is no critic."""


def record_in(folder: Path) -> RunRecord:
    return RunRecord(file=folder / "metrics.jsonl", launched=time.time() - 5)


def step(index: int, **changed: float) -> Metrics:
    return {"step": float(index)} | STEP | changed


def test_metrics_are_one_line_a_step_and_the_first_has_the_start(tmp_path: Path) -> None:
    record = record_in(tmp_path)
    with record.timed("engine"):
        time.sleep(0.02)
    added = [record.add(step(index), phases, TOKENS) for index, phases in enumerate([{}, PHASES])]
    finished = record.finish({"step": 2, "log_prob_difference_mean": 3e-6}, PHASES)
    first, second, final = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [first, second, final] == [*added, finished], "observers see what is written"
    assert 4.9 <= first.pop("startup/launch_and_import") < 60 and 0.02 <= first.pop("startup/engine") < 60
    assert first == {"kind": "step", "tokens_per_second/step": 60.0} | step(0)
    assert second == first | memory(PHASES) | {
        "step": 1, "seconds/generate": 0.5, "seconds/verify_readback": 0.125, "seconds/update_actor": 0.25, "tokens_per_second/generate": 25.0,
        "tokens_per_second/update_actor": 360.0,
    }  # fmt: skip
    assert final.pop("kind") == "final_check"
    assert final["final/step"] == 2 and final["final/log_prob_difference_mean"] == 3e-6
    assert final["final/seconds/generate"] == 0.5 and final["final/memory/max_rss"] == 3
    assert all(name.startswith("final/") for name in final)
    assert record.steps == [
        {"log_prob_difference_mean": 2.5e-6},
        {"log_prob_difference_mean": 2.5e-6, "seconds/verify_readback": 0.125},
    ], "what the report's section on the syncs reads, and no more: a run may have many steps"
    of_rank_1 = RunRecord(file=None, launched=0.0)
    of_rank_1.add(step(0), {}, {})
    assert len(of_rank_1.steps) == 1 and [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_lines_of_a_step_and_of_the_start(tmp_path: Path) -> None:
    record = record_in(tmp_path)
    record.startup |= {"launch_and_import": 1.0, "engine": 2.25, "first_token": 9.5}
    assert record.startup_line(models_beside_engine=True) == (
        "first token 9.5 s after launch (seconds: launch_and_import 1.0, engine 2.2; models were built meanwhile)"
    )
    assert step_line(step(3)) == (
        "step 3  reward 0.250  truncated 50%  log-prob difference 2.5e-06  actor loss -0.1250  grad norm 0.500  1.5 s"
    )
    assert "explained variance -0.500" in step_line(step(3, **CRITIC))


def on_gpu(used: int, engine: int, peak: int = 0) -> dict[str, int]:
    """A GPU of 100 GiB; all in GiB."""
    figures = {"rss": 2, "used": used, "reserved": used + 5, "peak": peak, "before": 3, "engine": engine}
    figures |= {"peak_reserved": used + 6}
    return {name: size * GIB for name, size in (figures | {"free": 95 - used - engine, "total": 100}).items()}


STAGES = {
    "resume_weights": [on_gpu(10, 20), on_gpu(11, 20)],
    "sync": [on_gpu(10, 20, peak=14), on_gpu(12, 20, peak=13)],
    "release": [on_gpu(4, 1), on_gpu(5, 2)],
}
ON_CPU = {"sync": [{"rss": 3 * GIB}, {"rss": 2 * GIB}]}


def test_metrics_have_the_worst_rank_all_ranks_and_the_end() -> None:
    metrics = memory(STAGES)
    assert (metrics["memory/max_allocated"], metrics["memory/max_reserved"]) == (14 * GIB, 18 * GIB)
    assert metrics["memory/sync/used"] == 12 * GIB and metrics["memory/sync/free"] == 63 * GIB
    assert metrics["memory/sync/extra"] == 11 * GIB
    assert metrics["memory/end"] == 12 * GIB
    assert metrics["memory/ranks_mib"]["sync"]["used"] == [10 * 1024, 12 * 1024]
    assert list(metrics["memory/ranks_mib"]) == ["resume_weights", "sync", "release"]
    assert memory({}) == {} and memory(ON_CPU) == {
        "memory/max_rss": 3 * GIB,
        "memory/sync/rss": 3 * GIB,
        "memory/end": 3 * GIB,
        "memory/ranks_mib": {"sync": {"rss": [3072, 2048]}},
    }
