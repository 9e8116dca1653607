"""The recipes for clusters, as far as they can be tested on one machine.

Neither Slurm nor sshd nor Kubernetes can run here. Mocks stand in for scontrol, srun and ssh: programs on PATH that
start the same commands on this machine with the variables that the real ones set. Where no real torchrun is needed, a
mock of it sleeps or fails.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.tools.command_line import parse
from harness.tools.repro.local_ranks import free_port

REPOSITORY = Path(__file__).parents[2]
LAUNCH = REPOSITORY / "launch"
MEET = Path(__file__).with_name("meet.py")
AWKWARD = "two words; $(touch broken) 'quoted'"

SCONTROL = '#!/bin/bash\n[ "$*" = "show hostnames $SLURM_JOB_NODELIST" ] || exit 9\nprintf "%s\\n" $MOCK_HOSTS\n'
SRUN = """#!/bin/bash
# As srun --kill-on-bad-exit: a task on each node; the first failure ends the others.
case "$1 $2" in "--ntasks-per-node=1 --kill-on-bad-exit=1") shift 2 ;; *) exit 9 ;; esac
for node in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$node "$@" & done
for _ in $(seq $SLURM_NNODES); do
    wait -n || { code=$?; kill $(jobs -p); exit $code; }
done
"""
# As ssh: its arguments after options and host become one string for the other side's shell.
SSH = '#!/bin/bash\nwhile [ "${1#-}" != "$1" ]; do shift 2; done\nshift\ncd /\nexec sh -c "$*"\n'
TORCHRUN = """#!/bin/bash
# A host's torchrun. MOCK_DOES: pass, or wait until it is ended, or fail on the second host while the first one waits.
trap 'kill $!; echo ended >"$MOCK_FOLDER/$$.ended"; exit 143' TERM # before the tests see that it has started
echo "$@" >"$MOCK_FOLDER/$$.part" && mv "$MOCK_FOLDER/$$.part" "$MOCK_FOLDER/$$.arguments"
if [ "$MOCK_DOES" = pass ]; then exit 0; fi
if [ "$MOCK_DOES" = fail ] && [[ "$*" = *is_host=0* ]]; then
    until [ "$(ls "$MOCK_FOLDER" | grep -c arguments)" = 2 ]; do sleep 0.1; done
    exit 3
fi
sleep 100 & wait $!
"""


def program(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    file.chmod(0o755)
    return file


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """An environment with mocks on PATH, and a real torchrun, of one rank a host: torch is slow to import."""
    mocks = tmp_path / "mocks"
    mocks.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("ssh", SSH)):
        program(mocks, name, text)
    torchrun = program(mocks, "torchrun", f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n')
    inherited = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    return inherited | {
        "PATH": f"{mocks}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "TORCHRUN": str(torchrun),
        "RANKS_PER_HOST": "1",
        "RDZV_PORT": str(free_port()),
        "RUN_DIR": str(tmp_path / "runs" / "shared"),
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NNODES": "2",
        "MOCK_HOSTS": "localhost otherhost",
        "MOCK_FOLDER": str(tmp_path),
        "MOCK_DOES": "wait",
        "HOSTS": "me@localhost otherhost",
    }


def ran(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def check_met(environment: dict[str, str], words: list[str]) -> None:
    """Two ranks on two hosts met, and each got its words as they were."""
    seen = [json.loads((Path(environment["RUN_DIR"]) / f"rank{rank}.json").read_text()) for rank in range(2)]
    for rank, each in enumerate(seen):
        assert (each["RANK"], each["WORLD_SIZE"]) == (rank, 2)
        assert (each["GROUP_RANK"], each["LOCAL_RANK"], each["LOCAL_WORLD_SIZE"]) == (rank, 0, 1)
        assert (each["sum"], each["words"]) == (1, words)


@pytest.mark.long
def test_slurm_starts_a_torchrun_on_each_host(cluster: dict[str, str]) -> None:
    done = ran(cluster, "bash", str(LAUNCH / "slurm.sbatch"), str(MEET), AWKWARD)
    assert done.returncode == 0, done.stdout + done.stderr
    check_met(cluster, [AWKWARD])


@pytest.mark.slow
def test_ssh_starts_a_torchrun_on_each_host_over_ipv6(cluster: dict[str, str]) -> None:
    done = ran(cluster | {"RDZV_HOST": "::1"}, str(LAUNCH / "ssh.sh"), str(MEET), AWKWARD)
    assert done.returncode == 0, done.stdout + done.stderr
    check_met(cluster, [AWKWARD])


@pytest.mark.long
def test_the_pods_command_starts_a_torchrun_in_each(cluster: dict[str, str]) -> None:
    container = manifest()["Job"]["spec"]["template"]["spec"]["containers"][0]
    values = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    pods = [
        subprocess.Popen(
            container["command"],
            cwd=REPOSITORY,
            env=values
            | cluster
            | {
                "JOB_COMPLETION_INDEX": str(index),
                "JOB_UID": "uid",
                "JOB": f"{MEET} plain words",
                "RDZV_HOST": "localhost",
            },
        )
        for index in (1, 0)
    ]
    assert [pod.wait(120) for pod in pods] == [0, 0]
    check_met(cluster, ["plain", "words"])


def mocked(cluster: dict[str, str], tmp_path: Path, does: str) -> dict[str, str]:
    return cluster | {"TORCHRUN": str(program(tmp_path, "mock-torchrun", TORCHRUN)), "MOCK_DOES": does}


def started(tmp_path: Path, count: int) -> list[list[str]]:
    """Command lines of the mocked torchruns, once there are as many."""
    until = time.monotonic() + 60
    while len(files := sorted(tmp_path.glob("*.arguments"))) < count:
        assert time.monotonic() < until, files
        time.sleep(0.05)
    return [file.read_text().split() for file in files]


def test_ssh_ends_all_hosts_when_one_fails(cluster: dict[str, str], tmp_path: Path) -> None:
    begin = time.monotonic()
    done = ran(mocked(cluster, tmp_path, "fail"), str(LAUNCH / "ssh.sh"))
    assert (done.returncode, time.monotonic() - begin < 20) == (3, True), done.stdout + done.stderr
    assert "a host ended with code 3; ending the others" in done.stderr
    assert len(list(tmp_path.glob("*.ended"))) == 1
    assert not left_over(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ssh_ends_all_hosts_when_it_is_ended(number: signal.Signals, cluster: dict[str, str], tmp_path: Path) -> None:
    script = subprocess.Popen([str(LAUNCH / "ssh.sh")], env=mocked(cluster, tmp_path, "wait"), cwd=tmp_path)
    started(tmp_path, 2)
    script.send_signal(number)
    assert script.wait(60) == (130 if number != signal.SIGKILL else -number)
    until = time.monotonic() + 60
    while left_over(tmp_path) and time.monotonic() < until:  # a killed script waits for none of them
        time.sleep(0.05)
    assert len(list(tmp_path.glob("*.ended"))) == 2
    assert not left_over(tmp_path)


def left_over(tmp_path: Path) -> list[int]:
    """Mocked torchruns that still run."""
    pids = [int(file.stem) for file in tmp_path.glob("*.arguments")]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_slurm_fails_when_one_host_does(cluster: dict[str, str], tmp_path: Path) -> None:
    done = ran(mocked(cluster, tmp_path, "fail"), "bash", str(LAUNCH / "slurm.sbatch"))
    assert done.returncode == 3, done.stdout + done.stderr


@pytest.mark.parametrize("recipe", ["slurm.sbatch", "ssh.sh"])
def test_the_default_job_is_one_that_can_run(recipe: str, cluster: dict[str, str], tmp_path: Path) -> None:
    environment = mocked(cluster, tmp_path, "pass") | {"RANKS_PER_HOST": "8", "MOCK_HOSTS": "fd00::7 fd00::8"}
    ran(environment | {"RDZV_HOST": "fd00::7"}, "bash", str(LAUNCH / recipe))
    for words in started(tmp_path, 2):
        assert {"--nnodes=2", "--nproc-per-node=8", "--rdzv-backend=c10d"} <= set(words)
        assert f"--rdzv-endpoint=[fd00::7]:{cluster['RDZV_PORT']}" in words
        check_job(words[words.index("launch/ppo.py") + 1 :])
        assert words[-2:] == ["--run.dir", cluster["RUN_DIR"]]


def check_job(words: list[str]) -> None:
    """A config that 16 ranks can run. Raises ConfigError."""
    words = [str(REPOSITORY / word) if word.endswith(".toml") else word for word in words]
    parallel = parse(words).config.parallel
    assert parallel.dp * parallel.tp * parallel.pp == 16


def manifest() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())}


def test_the_manifest_fits_together() -> None:
    """Names, numbers and ports must agree, which no schema checks."""
    found = manifest()
    service, job = found["Service"], found["Job"]
    spec = job["spec"]
    template = spec["template"]["spec"]
    [container] = template["containers"]
    environment = {each["name"]: each for each in container["env"]}
    values = {name: each.get("value") for name, each in environment.items()}
    assert all(isinstance(value, str | None) for value in values.values())  # Kubernetes refuses numbers
    assert spec["completions"] == spec["parallelism"] == int(values["NNODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(values["RANKS_PER_HOST"])
    [rule] = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    # A pod is found as <job>-<index>.<subdomain>, and the Service of that name selects the job's pods.
    assert service["metadata"]["name"] == template["subdomain"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert values["RDZV_HOST"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    ports = [service["spec"]["ports"][0]["port"], container["ports"][0]["containerPort"], int(values["RDZV_PORT"])]
    assert len(set(ports)) == 1
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in template["volumes"]}
    shared_memory = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}["/dev/shm"]
    volume = next(each for each in template["volumes"] if each["name"] == shared_memory)
    assert volume["emptyDir"]["medium"] == "Memory"
    names = list(environment)
    assert names.index("JOB_UID") < names.index("RUN_DIR")  # $(NAME) is replaced by what comes before
    check_job(values["JOB"].split()[1:])
