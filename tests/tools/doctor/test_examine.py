"""The doctor as a user starts it, on real ranks of this machine's CPU."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from harness.cluster.world import Launch
from harness.config.schema import Config
from harness.tools.doctor import examine

REPOSITORY = Path(__file__).resolve().parents[3]
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU; test_gpu.py has the others")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(ranks: int, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={ranks}",
        f"--master-port={free_port()}",
    ]
    return subprocess.run(
        [*command, *words],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=90,
    )


def alone(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """One rank without torchrun, which hides the ranks' exit codes."""
    launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "launch/doctor.py", *words],
        cwd=REPOSITORY,
        env=os.environ | launched | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def verdict_of(output: str) -> str:
    return output.strip().splitlines()[-1]


@on_cpu
def test_two_healthy_ranks_are_ok() -> None:
    run = torchrun(2, "launch/doctor.py", "configs/cpu/quickstart.toml")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 ranks on 1 host, mesh dp=1 tp=2 pp=1" in run.stdout and "(no GPU: " in run.stdout
    assert "gloo all-reduce, engine 1 group (ranks 0, 1): " in run.stdout
    assert verdict_of(run.stdout).startswith("OK")


@on_cpu
def test_a_variable_that_differs_is_a_fault_in_json_too() -> None:
    run = torchrun(2, "tests/tools/doctor/doctor_with_an_odd_rank.py", "NCCL_CUMEM_ENABLE=0", "--json")
    assert run.returncode == 1
    told = json.loads(run.stdout)
    assert told["verdict"] == "faults" and len(told["ranks"]) == len(told["links"]) == 2
    (fault,) = [each for each in told["findings"] if each["fault"]]
    assert fault["check"] == "environment" and fault["ranks"] == [1]
    assert fault["what"] == "NCCL_CUMEM_ENABLE differs: unset on rank 0; 0 on rank 1"
    assert told["links"][0]["collectives"][0]["bandwidth"] > 1e6


@on_cpu
def test_exit_codes_of_one_rank() -> None:
    healthy = alone()
    assert healthy.returncode == 0 and "1 ranks on 1 host" in healthy.stdout, healthy.stdout + healthy.stderr
    missing = alone("--model.name", "/nonexistent/model")
    assert missing.returncode == 1 and "model.name = /nonexistent/model is not there" in missing.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--parallel.tp", "2"], "= 2, but the world size is 1: start 2 ranks"),
        (["--modle.name", "x"], "modle (command line) is not a key; the nearest is model"),
        (["--dry-run"], "--dry-run, --check and what belongs to them are options of launch/ppo.py"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(words: list[str], sentence: str) -> None:
    run = alone(*words)
    assert run.returncode == 2 and sentence in run.stderr and len(run.stderr.splitlines()) == 1


def test_outside_torchrun_it_says_how_to_start() -> None:
    run = alone(RANK="")
    assert run.returncode == 2 and "RANK" in run.stderr


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    told = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return dict(os.environ)


def launch(rank: int) -> Launch:
    return Launch(rank=rank, world_size=2, local_rank=rank, local_world_size=2)


def test_a_rank_that_never_comes_is_named_in_time(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examine, "FACTS", 2.0)
    began = time.monotonic()
    assert examine.examine(Config(), launch(0), environment) == 1
    assert time.monotonic() - began < 10
    assert "1. FAULT missing: rank 1 of 2 never came (waited 2 s)" in capsys.readouterr().out


def test_a_rank_whose_store_does_not_answer_says_so(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examine, "MEET", 0.5)
    assert examine.examine(Config(), launch(1), environment) == 1
    assert f"rank 1: no answer from the store at 127.0.0.1:{environment['MASTER_PORT']}" in capsys.readouterr().err


def test_a_rank_that_dies_in_the_measurements_does_not_hang_the_others(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 tells its facts and is gone: rank 0 says so, and that their all-reduce failed."""
    monkeypatch.setattr(examine, "LINKS", 4.0)
    monkeypatch.setattr(examine, "SPREAD", 1.0)
    monkeypatch.setattr(examine, "LEAVE_SECONDS", 0.2)
    other = (
        "import os, sys; from harness.cluster.world import Launch; from harness.config.schema import Config;"
        " from harness.tools.doctor.facts import collect; from harness.tools.doctor.meeting import Meeting, connect;"
        " launch = Launch.from_environment(os.environ); store = connect(os.environ, 20);"
        " Meeting(store, 1, 2).gather('facts', collect(Config(), launch, os.environ), 1, object); os._exit(0)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", other], cwd=REPOSITORY, env=environment | {"RANK": "1", "LOCAL_RANK": "1"}
    )
    began = time.monotonic()
    assert examine.examine(Config(), launch(0), environment) == 1
    assert time.monotonic() - began < 20 and process.wait(10) == 0
    told = capsys.readouterr().out
    assert "FAULT silent on vm (rank 1)".replace("vm", socket.gethostname()) in told
    assert "gloo all-reduce of engine (ranks 0, 1): " in told


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces take root")
@on_cpu
def test_two_emulated_hosts_with_one_clock_wrong() -> None:
    """IPv6, a Debian /etc/hosts and torchrun told host0's name: the addresses are right all the same."""
    options = ["--hosts", "2", "--ranks-per-host", "2", "--ipv6", "--debian-hosts", "--master", "hostname"]
    run = subprocess.run(
        [sys.executable, "launch/hosts.py", *options, "--skew", "host1=+90s", "--", "launch/doctor.py"],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if run.returncode == 125:
        pytest.skip(run.stderr.strip())
    lines = [line.partition("| ")[2] for line in run.stdout.splitlines() if line.startswith("host0 | ")]
    told = "\n".join(lines)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "4 ranks on 2 hosts, mesh dp=1 tp=4 pp=1" in told
    assert "1. FAULT clocks on host1 (ranks 2, 3): this clock is 90.0 s ahead of rank 0's" in told
    assert "gloo all-reduce, hosts  1 group (ranks 0, 2): " in told
    assert "1 fault" in told and not [line for line in lines if "FAULT" in line and "clocks" not in line]
