"""The doctor as a user starts it, on real ranks of this machine's CPU."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import doctor
import pytest
import torch
from msgspec.structs import replace

from harness.cluster.world import Launch
from harness.config.schema import Config, Parallel
from harness.tools.doctor import examine
from harness.tools.doctor.job_store import JobStore, connect
from harness.tools.doctor.rank_facts import RankFacts, collect
from harness.tools.repro.local_ranks import free_port

REPOSITORY = Path(__file__).resolve().parents[3]
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU; test_gpu.py has the others")


def torchrun(ranks: int, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    options = [f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, *words],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=90,
    )


@on_cpu
def test_two_healthy_ranks_are_ok() -> None:
    run = torchrun(2, "launch/doctor.py", "configs/cpu/quickstart.toml")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 ranks on 1 host, mesh dp=1 tp=2 pp=1" in run.stdout and "(no GPU: " in run.stdout
    assert "gloo all-reduce of all ranks: " in run.stdout
    assert run.stdout.strip().splitlines()[-1].startswith("OK")


@on_cpu
def test_a_variable_that_differs_on_another_host_is_a_fault() -> None:
    run = torchrun(2, "tests/tools/doctor/doctor_with_an_odd_rank.py", "NCCL_CUMEM_ENABLE=0,HARNESS_HOST=odd")
    assert run.returncode == 1
    assert "2 ranks on 2 hosts" in run.stdout
    assert "1. FAULT environment on odd (rank 1): NCCL_CUMEM_ENABLE differs: unset on rank 0; 0 on rank 1" in run.stdout
    assert "does not reach" not in run.stdout and "gloo all-reduce of all ranks: " in run.stdout


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What torchrun sets for rank 0 of 2."""
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return dict(os.environ)


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--parallel.tp", "4"], ("parallel.tp", "= 4", "world size is 2")),
        (["--modle.name", "x"], ("modle", "model")),
        (["--dry-run"], ("--dry-run", "launch/ppo.py")),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    words: list[str], facts: tuple[str, ...], environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and all(fact in line for fact in facts)


def test_outside_torchrun_it_says_how_to_start(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK")
    assert doctor.main([]) == 2 and "torchrun" in capsys.readouterr().err


def launch(rank: int, world_size: int = 2) -> Launch:
    return Launch(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)


def test_one_rank_alone_and_what_is_missing_for_it(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(parallel=Parallel(tp=1))
    assert examine.examine(config, launch(0, 1), environment) in (0, 1)  # this machine may have faults of its own
    config.model.name = "/nonexistent/model"
    assert examine.examine(config, launch(0, 1), environment | {"MASTER_PORT": str(free_port())}) == 1
    first, _, second = capsys.readouterr().out.partition("1 ranks on 1 host")[2].partition("1 ranks on 1 host")
    assert "inputs" not in first and "model.name = /nonexistent/model is not there" in second


def test_a_rank_that_never_comes_is_named_in_time(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examine, "FACTS", 3.0)
    monkeypatch.setattr(examine, "LEAVE_SECONDS", 0.1)
    began = time.monotonic()
    assert examine.examine(Config(), launch(0), environment) == 1
    assert time.monotonic() - began < 10
    assert "1. FAULT missing: rank 1 of 2 never came (waited 3 s)" in capsys.readouterr().out


def test_a_rank_whose_store_does_not_answer_says_so(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examine, "MEET", 0.3)
    assert examine.examine(Config(), launch(1), environment) == 1
    assert f"rank 1: no answer from the store at 127.0.0.1:{environment['MASTER_PORT']}" in capsys.readouterr().err


def test_a_rank_that_dies_in_the_measurements_does_not_hang_the_others(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 reports its facts and no more: rank 0 reports that, and that their all-reduce failed."""
    monkeypatch.setattr(examine, "LINKS", 3.0)
    monkeypatch.setattr(examine, "READY", 1.0)
    monkeypatch.setattr(examine, "SPREAD", 0.5)
    monkeypatch.setattr(examine, "LEAVE_SECONDS", 0.1)

    def rank_1() -> None:
        facts = replace(collect(Config(), launch(1), environment), rank=1)
        JobStore(connect(environment, 20), 1, 2).gather("facts", facts, 1, RankFacts)

    other = threading.Thread(target=rank_1)
    other.start()
    began = time.monotonic()
    assert examine.examine(Config(), launch(0), environment) == 1
    assert time.monotonic() - began < 20
    other.join()
    output = capsys.readouterr().out
    assert f"FAULT silent on {socket.gethostname()} (rank 1)" in output
    assert "gloo all-reduce: " in output


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces take root")
@on_cpu
def test_two_emulated_hosts() -> None:
    """IPv6, a Debian /etc/hosts and torchrun given the name of host0: the addresses are right all the same."""
    options = ["--hosts", "2", "--ranks-per-host", "2", "--network", "ipv6", "--debian-hosts", "--master", "hostname"]
    run = subprocess.run(
        [sys.executable, "launch/hosts.py", *options, "--", "launch/doctor.py"],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if run.returncode == 125:
        pytest.skip(run.stderr.strip())
    lines = [line.partition("| ")[2] for line in run.stdout.splitlines() if line.startswith("host0 | ")]
    found = "\n".join(lines)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "4 ranks on 2 hosts, mesh dp=1 tp=4 pp=1" in found
    assert "gloo all-reduce of all ranks: " in found
    assert "FAULT" not in found
