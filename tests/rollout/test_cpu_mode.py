import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.rollout.engine_settings import cores_by_tp_rank, cpu_environment

REPOSITORY = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("cpu_engine_worker.py")


@pytest.mark.parametrize(
    ("cores", "ranks", "bind"),
    [
        ({0, 1}, 1, "0,1"),
        ({0, 1}, 2, "0|1"),
        ({0, 1}, 5, "0|1|0|1|0"),
        ({2, 5, 7, 9, 11}, 2, "2,5|7,9"),
        ({3}, 2, "3|3"),
    ],
)
def test_cores_are_split_among_ranks(monkeypatch: pytest.MonkeyPatch, cores: set[int], ranks: int, bind: str) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)  # this machine's cores are not the test's
    assert cpu_environment(ranks) == {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": bind,
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_NCCL_SO_PATH": "absent-in-cpu-mode",
    }


@pytest.mark.parametrize(
    ("entries", "tp_ranks", "tp", "expected"),
    [
        (["0", "1"], [0, 1], 2, ["0", "1"]),
        (["0", "1"], [0, 0], 1, ["0,1"]),
        (["0", "1"], [2, 3], 4, ["0", "0", "0", "1"]),
        (["0,1", "2,3", "4,5", "6,7"], [0, 1, 0, 1], 2, ["0,1,4,5", "2,3,6,7"]),
        (["3", "3"], [0, 0], 1, ["3"]),
    ],
)
def test_older_releases_have_an_entry_for_each_tp_rank(
    entries: list[str], tp_ranks: list[int], tp: int, expected: list[str]
) -> None:
    assert cores_by_tp_rank(entries, tp_ranks, tp) == expected


@pytest.mark.long
def test_a_real_engine_serves_with_the_stand_ins(tmp_path: Path) -> None:
    command = [sys.executable, str(WORKER), "deepseek_v3", str(tmp_path / "model")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    lines = [line for line in run.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, run.stdout[-2000:] + run.stderr[-4000:]
    answer = json.loads(lines[0].removeprefix("ANSWER "))
    assert len(answer["tokens"]) == 6
    assert answer["got"] == pytest.approx(answer["expected"], abs=1e-4)
