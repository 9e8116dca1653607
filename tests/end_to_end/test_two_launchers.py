"""The two-host command typed several times on one machine: several torchruns, whose ranks share a host and an engine."""

import json
import re
import time
from pathlib import Path

import pytest

from harness.runtime.processes import shared_memory_files
from harness.tools.repro.local_ranks import free_port
from tests.end_to_end.launching import QUICKSTART, Job, Launcher
from tests.tools.watchdog.hosts import ended

pytestmark = pytest.mark.slow

END_SECONDS = 60


def agents(folder: Path, number: int, *arguments: str, launcher: Launcher = "forked", ranks: int = 2) -> list[Job]:
    """Torchruns of one run, each started."""
    meeting = [f"--nnodes={number}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    return [
        Job(
            folder=folder,
            ranks=ranks,
            arguments=[QUICKSTART, "--run.steps", "2", *arguments],
            launcher=launcher,
            agent=agent,
            meeting=[*meeting, "--local-addr=127.0.0.1"],
        ).start()
        for agent in range(number)
    ]


@pytest.mark.parametrize(
    ("number", "ranks", "arguments"),
    [
        (2, 2, ["--parallel.tp", "4"]),
        pytest.param(
            4,
            1,
            ["--parallel.tp", "2", "--parallel.pp", "2", "--weights.transport", "pull"],
            marks=pytest.mark.long,
        ),
    ],
    ids=["two-tp4", "four-pp2-pull"],
)
def test_ranks_of_several_launchers_share_an_engine(
    tmp_path: Path, number: int, ranks: int, arguments: list[str]
) -> None:
    jobs = agents(tmp_path / "run", number, *arguments, ranks=ranks)
    assert [job.wait() for job in jobs] == [0] * number, "\n".join(job.output()[-3000:] for job in jobs)
    said = "".join(job.output() for job in jobs)
    assert said.count("PASSED: 2 PPO steps; 3 weight syncs onto poison") == 1
    assert "4 ranks on 1 host" in said and "engine 0 node 0: ranks 0" in said
    assert [job.left_behind() for job in jobs] == [[]] * number


@pytest.mark.long
def test_a_rank_killed_under_one_launcher_is_the_first_failure_on_both(tmp_path: Path) -> None:
    jobs = agents(tmp_path / "run", 2, "--parallel.tp", "4", "--inject", "kill@sync:3:1")
    check_end(jobs, rf"FIRST FAILURE: rank 3 on \S+ {ended('was killed by SIGKILL')} in sync of step 1")
    kept = sorted((tmp_path / "run").glob("failure-*.json"))
    assert [file.stem.rpartition("-")[2] for file in kept] == ["rank0", "rank2"], "each launcher keeps its own"
    assert [json.loads(file.read_text())["first"]["ranks"] for file in kept] == [[3], [3]]


@pytest.mark.long
def test_a_killed_launcher_is_the_first_failure_on_both(tmp_path: Path) -> None:
    jobs = agents(tmp_path / "run", 2, "--parallel.tp", "4", "--run.steps", "100", launcher="plain")
    jobs[0].wait_for_phase("generate")
    jobs[1].look()
    jobs[1].process.kill()
    check_end(jobs, r"FIRST FAILURE: torchrun of ranks \d, \d on \S+ \(pid \d+\) is gone")


def check_end(jobs: list[Job], first: str) -> None:
    """All end, and say the same first failure; nothing is left of any."""
    memory: set[Path] = set()
    while any(job.process.poll() is None for job in jobs):
        for job in jobs:
            job.look()
            memory |= shared_memory_files(process.pid for process in job.seen)
        time.sleep(0.3)
    for job in jobs:
        assert job.process.returncode != 0 and re.search(first, job.output()), job.output()[-4000:]
        assert job.left_behind(END_SECONDS) == []
    assert [file for file in memory if file.exists()] == []
