"""What a verdict says beside the first failure: a scheduler's traceback, and the catalogue's entry."""

import time
from pathlib import Path

from harness.tools.watchdog.explain import SECONDS, Explanation
from harness.tools.watchdog.failure import TRACE_LINES, Failure, Place

SCHEDULER = """[2026-11-21 08:00:00 TP0] Load weight begin. avail mem=1.00 GB
[2026-11-21 08:00:01 TP1] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/sglang/srt/managers/scheduler.py", line 3000, in run_scheduler_process
    scheduler = Scheduler(server_args)
[2026-11-21 08:00:01 TP0] Memory pool end.
  File "/x/sglang/srt/model_loader/loader.py", line 7, in load
    raise ValueError("no such thing")
ValueError: no such thing
"""


def explained(failure: Failure, folder: Path | None) -> list[str]:
    explanation = Explanation(failure, folder).begin()
    end = time.monotonic() + 10 * SECONDS
    while not explanation.is_there:
        assert time.monotonic() < end
        time.sleep(0.01)
    return explanation.lines


def failure(detail: str, **values: object) -> Failure:
    given = {"kind": "exception", "time": 0.0, "host": "host0", "ranks": (0,), "place": Place(3, "sync", 1, True)}
    return Failure(detail=detail, **given | values)  # type: ignore[arg-type]


def test_a_schedulers_traceback_is_told_without_the_lines_of_others(tmp_path: Path) -> None:
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "engine-rank0.log").write_text(SCHEDULER)
    (tmp_path / "engines" / "engine-rank2.log").write_text(SCHEDULER.replace("thing", "other"))
    detail = "engine process sglang::schedul (pid 7) died: ValueError: no such thing (whole log: /x/engine-rank0.log)"
    first, *lines = explained(failure(detail), tmp_path)
    assert first == "engine-rank0.log:"
    assert lines[0].startswith("| [2026-11-21 08:00:01 TP1] Scheduler hit")
    assert "| ValueError: no such thing" in lines
    assert not any("Memory pool" in line for line in lines)
    assert len([line for line in lines if line.startswith("| ")]) <= TRACE_LINES


def test_the_traceback_of_one_who_lost_a_killed_scheduler_is_told_as_what_followed(tmp_path: Path) -> None:
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "engine-rank0.log").write_text(SCHEDULER)
    detail = "engine process sglang::scheduler_TP0 (pid 7) died of SIGKILL (whole log: /x/engine-rank0.log)"
    first, *lines = explained(failure(detail), tmp_path)
    assert first == "engine-rank0.log, what followed:"
    assert "| ValueError: no such thing" in lines


def test_a_known_failure_is_named_with_cause_fix_and_versions(tmp_path: Path) -> None:
    # No word of SGLang is in it: that this run has an engine is known without.
    said = "KeyError: 'CUDA_VISIBLE_DEVICES'"
    lines = explained(failure(said, trace=("Traceback (most recent call last):", said)), tmp_path)
    assert any(line.startswith("known as illegal-cuda-visible-devices (") for line in lines), lines
    for name in ("cause", "fix", "versions"):
        assert any(line.startswith(f"  {name}:") for line in lines)


def test_an_unknown_failure_is_given_no_name(tmp_path: Path) -> None:
    assert explained(failure("ArithmeticError: planted on rank 1"), tmp_path) == ["no known failure of the catalogue"]


def test_a_lost_host_has_no_text_to_look_at() -> None:
    assert explained(failure("", kind="lost"), None) == []
