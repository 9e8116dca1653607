"""What a verdict says: the sentence of each kind of failure, its consequences, and what explains it."""

import json
import multiprocessing
import resource
from pathlib import Path

import pytest

from harness.runtime.failure import Failure
from harness.tools.hosts.phase_gate import HOST_FAULTS
from harness.tools.watchdog.failures import ERROR_LENGTH, TRACE_LINES, JobView, Place, report_lines, sentence
from harness.tools.watchdog.verdict import RunVerdict, explain

IN_SYNC = Place(9, "sync", 1, True)
EARLIER = Place(8, "resume_weights", 1, False)
SMALL_BYTES = 100
HOSTS = {0: "host0", 1: "host0", 2: "host1", 3: "host1"}
NOON = 1_700_049_600.0  # 12:00:00 UTC


def view(*places: Place) -> JobView:
    return JobView(now=NOON + 10.24, world_size=4, places=dict(enumerate(places)), hosts=HOSTS)


def failed(**values: object) -> Failure:
    given = {"kind": "deadline", "time": NOON, "host": "host0", "ranks": (0,), "seconds": 60.0}
    given |= {"phase": "sync", "step": 1, "inside": True}
    return Failure(**given | values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("failure", "places", "said"),
    [
        (
            failed(kind="lost", host="host1", ranks=(2, 3)),
            [IN_SYNC, IN_SYNC, IN_SYNC, EARLIER],
            "host1 (ranks 2, 3) is gone: last heard 12:00:00 UTC, 10.2 s ago, when rank 2 was in sync of step 1 and rank 3"
            " was after resume_weights of step 1",
        ),
        (
            failed(kind="launcher", ranks=(0, 1), error="(pid 7) is gone"),
            [Place(9, "generate", 2, True)] * 4,  # where the ranks have come since then
            "torchrun of ranks 0, 1 on host0 (pid 7) is gone at 12:00:00 UTC, when its ranks were in sync of step 1",
        ),
        (
            failed(kind="stopped", ranks=(0,), error="engine process sglang::scheduler_TP1 (pid 7)"),
            [IN_SYNC] * 4,
            "engine process sglang::scheduler_TP1 (pid 7) of rank 0 on host0 was stopped in sync of step 1 (SIGSTOP, or a"
            " debugger): its limit of 60 s passed at 12:00:00 UTC",
        ),
        (
            failed(),
            [IN_SYNC, IN_SYNC, EARLIER, IN_SYNC],
            "deadline of 60 s passed in sync of step 1: rank 2 on host1 was after resume_weights of step 1, and had not"
            " arrived (waited for by ranks 0, 1, 3)",
        ),
        (
            failed(),
            [IN_SYNC, IN_SYNC, Place(10, "sync", 1, False), Place(11, "generate", 1, True)],
            "deadline of 60 s passed in sync of step 1: ranks 0, 1 on host0 were still there (waited for by ranks 2, 3)",
        ),
        (
            failed(),
            [IN_SYNC] * 4,
            "deadline of 60 s passed in sync of step 1: all ranks (0, 1, 2, 3) are in it, and none makes progress",
        ),
        (
            failed(),
            [IN_SYNC] * 2,
            "deadline of 60 s passed in sync of step 1: no report from ranks 2, 3 (waited for by ranks 0, 1)",
        ),
        (
            failed(kind="echo", ranks=(0,), error="Connection closed by peer"),
            [IN_SYNC, IN_SYNC, IN_SYNC, EARLIER],
            "a peer vanished: rank 3 last reported after resume_weights of step 1; rank 0 on host0 lost a peer in sync of"
            " step 1 at 12:00:00 UTC: Connection closed by peer",
        ),
    ],
)
def test_a_failure_is_one_sentence(failure: Failure, places: list[Place], said: str) -> None:
    assert sentence(failure, view(*places)) == said


def test_consequences_follow_the_cause_and_are_folded() -> None:
    cause = failed(kind="exception", ranks=(3,), host="host1", error="ValueError: no", time=NOON)
    echoes = [
        failed(kind="echo", ranks=(rank,), error="Connection closed by peer", time=NOON + rank + 0.5)
        for rank in range(6)
    ]
    first, *rest = report_lines([*echoes, cause], view(*[IN_SYNC] * 4))
    assert first == "FIRST FAILURE: rank 3 on host1 failed in sync of step 1 at 12:00:00 UTC: ValueError: no"
    assert rest == [
        "  +0.5 to +5.5 s: ranks 0, 1, 2, 3, 4, 5 on host0 failed too in sync of step 1: Connection closed by peer"
    ]


SCHEDULER = """[2026-11-21 08:00:00 TP0] Load weight begin. avail mem=1.00 GB
[2026-11-21 08:00:01 TP1] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/sglang/srt/managers/scheduler.py", line 3000, in run_scheduler_process
    scheduler = Scheduler(server_args)
[2026-11-21 08:00:01 TP0] Memory pool end.
  File "/x/sglang/srt/model_loader/loader.py", line 7, in load
    raise ValueError("no such thing")
ValueError: no such thing
"""


def failure(error: str, **values: object) -> Failure:
    return failed(**{"kind": "exception", "error": error} | values)


def test_a_schedulers_traceback_is_shown_without_lines_of_other_processes(tmp_path: Path) -> None:
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "engine-rank0.log").write_text(SCHEDULER)
    (tmp_path / "engines" / "engine-rank2.log").write_text(SCHEDULER.replace("thing", "other"))
    detail = "engine process sglang::schedul (pid 7) died: ValueError: no such thing (whole log: /x/engine-rank0.log)"
    first, *lines = explain(failure(detail), tmp_path)[0]
    assert first == "engine-rank0.log has:"
    assert lines[0].startswith("| [2026-11-21 08:00:01 TP1] Scheduler hit")
    assert "| ValueError: no such thing" in lines
    assert not any("Memory pool" in line for line in lines)
    assert len([line for line in lines if line.startswith("| ")]) <= TRACE_LINES


def test_a_fault_that_was_injected_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_FAULTS, "kill host1@12s")
    events = tmp_path / "events" / "rank1.jsonl"
    events.parent.mkdir()
    events.write_text(
        '{"event": "injected", "fault": "slow@sync:1"}\n{"event": "injected", "fault": "kill@sync:1:1"}\n'
    )
    killed, lost = failed(kind="died", error="rank 1 was killed by SIGKILL"), failed(kind="lost", host="host1")
    for cause, folder, fault in ((killed, tmp_path, "kill@sync:1:1"), (lost, None, "kill host1@12s")):
        lines, named = explain(cause, folder)
        assert (lines, named.slug) == ([f"the run was told to fail: {fault} was injected"], "injected-fault")
    assert explain(failure("ValueError: no"), None)[1].slug == ""


def test_the_whole_error_decides_the_name_not_what_fits_into_a_heartbeat(tmp_path: Path) -> None:
    said = f"RuntimeError: {'x' * ERROR_LENGTH} torch_memory_saver: Cannot pause allocation that is not active"
    cut = failure(said[:ERROR_LENGTH])
    assert explain(cut, None)[1].slug == ""
    (tmp_path / "events").mkdir()
    event = {"event": "failed", "error": said, "traceback": f"Traceback (most recent call last):\n{said}"}
    (tmp_path / "events" / "rank0.jsonl").write_text(json.dumps(event) + "\n")
    named = explain(cut, tmp_path)[1]
    assert (named.slug, named.error) == ("double-resume-or-release", said)


def test_a_known_failure_is_named_with_cause_fix_and_versions_and_an_unknown_one_is_not(tmp_path: Path) -> None:
    # No word of SGLang is in it: that this run has an engine is known without.
    said = "KeyError: 'CUDA_VISIBLE_DEVICES'"
    lines, _ = explain(failure(said, traceback=("Traceback (most recent call last):", said)), tmp_path)
    for begin in ("looks like illegal-cuda-visible-devices: ", "  cause:", "  fix:", "  versions:"):
        assert any(line.startswith(begin) for line in lines), lines
    unknown = failure("ArithmeticError: planted on rank 1")
    assert explain(unknown, tmp_path)[0] == ["no known failure of the catalogue"]


def keep_on_a_full_disk(folder: Path) -> None:
    """Keep a verdict where a file can have SMALL_BYTES: what is written beyond fails, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_BYTES, SMALL_BYTES))
    RunVerdict("host0", folder, [failed()], view(IN_SYNC)).keep()


def test_a_full_disk_leaves_no_half_of_a_verdict(tmp_path: Path) -> None:
    file = tmp_path / "failure-host0.json"
    file.write_text("an earlier verdict")
    process = multiprocessing.get_context("fork").Process(target=keep_on_a_full_disk, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [(file.name, "an earlier verdict")]
