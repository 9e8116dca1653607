"""Hosts cut off and killed in some phases: harness.run as it is, torchrun on emulated hosts, a job of all-reduces."""

import json
import os
import re
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import psutil
import pytest

from harness.tools.hosts import kernel
from tests.end_to_end.launching import MARK, QUICKSTART, REPOSITORY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(bool(kernel.refusal()), reason=f"no namespaces here: {kernel.refusal()}"),
]

JOB = "tests/tools/watchdog/phases_with_gloo.py"
LOST_SECONDS = 5
END_SECONDS = LOST_SECONDS + 15
"""From the harm to the end of the surviving hosts, torchrun's included."""


@dataclass(frozen=True)
class Ended:
    output: str
    code: int
    folder: Path
    left: list[str]

    def verdict(self, host: str) -> str:
        (line,) = {line for line in self.output.splitlines() if line.startswith(f"{host} | FIRST FAILURE: ")}
        return line.split("FIRST FAILURE: ")[1]

    def happened(self, words: str) -> float:
        """Seconds since launch of the emulator's line that has these words."""
        times = [re.search(r"\((\d+\.\d) s\)$", line) for line in self.output.splitlines() if words in line]
        assert times and times[-1], self.output
        return float(times[-1][1])


def run(folder: Path, harm: list[str], *arguments: str, script: str = JOB) -> Ended:
    mark = uuid.uuid4().hex
    command = [sys.executable, "launch/hosts.py", "--hosts", "2", "--ranks-per-host", "1", *harm, "--", script]
    done = subprocess.run(
        [*command, QUICKSTART, "--run.dir", str(folder), "--run.heartbeat_timeout", str(LOST_SECONDS), *arguments],
        cwd=REPOSITORY,
        env=os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return Ended(done.stdout, done.returncode, folder, left_with(mark))


def left_with(mark: str) -> list[str]:
    """Processes that have the mark, 2 s later at most; temporary folders of process namespaces that are gone."""
    end = time.monotonic() + 2
    while True:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == mark:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue  # it has just ended, or is not ours
        namespaces = {f"-{os.stat(each).st_ino}-" for each in glob("/proc/[0-9]*/ns/pid") if os.path.exists(each)}
        found += [
            each
            for each in glob(f"/tmp/harness-{os.getuid()}-*-*.tmp-*")
            if not any(map(each.__contains__, namespaces))
        ]
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.1)


def check_the_end(ended: Ended, lost: str, other: str, rank: int, phase: str) -> None:
    """Check what the other host says of the lost one, and that nothing is left."""
    # The other's first beat with the phase in it may be the one that is not sent any more.
    assert re.fullmatch(
        rf"{lost} \(rank {rank}\) is gone: last heard \d\d:\d\d:\d\d UTC, \d+\.\d s ago, when its rank was .*",
        ended.verdict(other),
    )
    assert f"in {phase}" in ended.verdict(other)
    assert ended.code == 1
    assert "left behind" not in ended.output and ended.left == []
    assert json.loads((ended.folder / f"failure-{other}.json").read_text())["first"]["host"] == lost
    assert "Traceback" not in ended.output, "torchrun's own report is in the run directory"


def test_the_host_of_rank_0_that_is_killed_is_named_and_the_other_ends(tmp_path: Path) -> None:
    ended = run(tmp_path / "run", ["--kill", "host0@start_engine"], "--run.steps", "2")
    check_the_end(ended, "host0", "host1", 0, "start_engine of step 0")
    harmed = ended.happened("hosts: killed host")
    assert ended.happened("hosts: host1: torchrun FAILED") - harmed < END_SECONDS
    assert "the run was told to fail: kill host0@start_engine was injected" in ended.output


def test_a_host_with_a_part_of_a_real_engine_that_is_cut_off_is_named(tmp_path: Path) -> None:
    ended = run(tmp_path / "run", ["--cut=host1@generate:1"], script="launch/ppo.py")
    check_the_end(ended, "host1", "host0", 1, "generate")
    assert "the run was told to fail: cut host1@generate:1 was injected" in ended.output
    # The host of rank 0 writes the report.
    assert "Known as `injected-fault`" in (ended.folder / "report.md").read_text()
