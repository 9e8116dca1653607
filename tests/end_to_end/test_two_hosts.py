"""The main job across two emulated hosts of two ranks: real SGLang, torchrun on each host, a network between them."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.tools.hosts import kernel
from tests.end_to_end.launching import QUICKSTART, REPOSITORY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(kernel.refusal()), reason=f"no namespaces here: {kernel.refusal()}"),
]

STAGES = ("--parallel.tp", "2", "--parallel.pp", "2", "--parallel.rank_order", "dp,pp,tp")


def ppo(folder: Path, network: str, *arguments: str, hosts: tuple[str, ...] = ()) -> str:
    """The output of a run that passed."""
    command = [sys.executable, "launch/hosts.py", "--hosts", "2", "--ranks-per-host", "2", "--network", network, *hosts]
    done = subprocess.run(
        [*command, "--", "launch/ppo.py", QUICKSTART, "--run.dir", str(folder), *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "PASSED: 3 PPO steps; 4 weight syncs" in done.stdout
    return done.stdout


def check(folder: Path, output: str, address: str, nodes: list[str]) -> None:
    """Every sync is proven, the picture says where the engines are, and each rank says of which host it is."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < step["log_prob_difference_mean"] < 1e-5 for step in steps[:3])
    assert 0 < steps[3]["final/log_prob_difference_mean"] < 1e-5
    ranks = json.loads((folder / "environment.json").read_text())
    assert [rank["host"].split("/")[0] for rank in ranks] == ["host0", "host0", "host1", "host1"]
    assert len({rank["host"] for rank in ranks}) == 2
    report = (folder / "report.md").read_text()
    for line in (f"host1 ({address})", *nodes):
        assert line in output and line in report, line


@pytest.mark.long
def test_one_engine_of_tp_4_over_ipv4(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # Several interfaces, of which one joins the hosts, and a name that leads the master to itself.
    hosts = ("--interfaces", "2", "--master", "hostname", "--debian-hosts")
    output = ppo(folder, "ipv4", "--parallel.tp", "4", hosts=hosts)
    check(folder, output, "10.77.0.2", ["engine 0 node 0: ranks 0, 1 on host0", "engine 0 node 1: ranks 2, 3 on host1"])


@pytest.mark.long
def test_a_stage_on_each_host_over_ipv6(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    output = ppo(folder, "ipv6", *STAGES, "--model.name", "deepseek_v3")
    assert "tensors in the engine equal the trainer's by fingerprint" in output
    check(folder, output, "fd77::2", ["engine 0 node 0: ranks 0, 1 on host0", "engine 0 node 1: ranks 2, 3 on host1"])


@pytest.mark.long
def test_a_part_of_the_engine_that_fails_alone_ends_the_run_with_its_error(tmp_path: Path) -> None:
    """The other host is in SGLang's own start then, where it would wait for the part that failed until the deadline."""
    folder = tmp_path / "run"
    folder.mkdir(0o700)
    (folder / "engines" / "engine-rank2.log").mkdir(parents=True)  # where the log of the second host's part would be
    command = [sys.executable, "launch/hosts.py", "--hosts", "2", "--ranks-per-host", "2", "--network", "ipv4"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, "--", "launch/ppo.py", QUICKSTART, "--run.dir", str(folder), "--parallel.tp", "4"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == 1 and time.monotonic() - began < 300, done.stdout[-6000:]
    for host in ("host0", "host1"):
        first = rf"^{host} \| FIRST FAILURE: rank 2 on host1 failed in start_engine at .*: EngineFailed: engine start failed on"
        assert re.search(rf"{first} rank 2: IsADirectoryError", done.stdout, re.M), done.stdout[-6000:]
