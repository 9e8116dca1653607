"""harness.run as a library: the default config runs by itself, without observers, a command line or a config file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.tools.repro.local_ranks import free_port
from tests.end_to_end.launching import REPOSITORY

SCRIPT = """\
from harness.config.schema import Config
from harness.run import run

raise SystemExit(run(Config()))
"""


BAD_INTERFACE = SCRIPT.replace("Config()", "Config(network=Network(interface='nosuch0'))").replace(
    "import Config", "import Config, Network"
)
BAD_OBSERVER = """\
import os

from harness.config.schema import Config
from harness.observer import Observer
from harness.run import run


class Broken(Observer):
    def resolved(self, run):
        if run.world.rank:
            raise ValueError(run.config.weights.transport)


raise SystemExit(run(Config(), [Broken()]))
"""


def on_two_ranks(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "plain.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"]
    return subprocess.run(
        [*command, f"--master-port={free_port()}", "plain.py"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [
        (BAD_INTERFACE, "error: rank 0: network.interface = nosuch0"),
        (BAD_OBSERVER, "rank 1 FAILED: ValueError: bucket"),
    ],
    ids=["interface", "observer"],
)
def test_what_ends_a_run_as_its_ranks_meet_is_said(script: str, said: str, tmp_path: Path) -> None:
    done = on_two_ranks(script, tmp_path)
    assert done.returncode == 1 and said in done.stdout, done.stdout[-4000:]
    assert "Traceback" not in done.stdout.partition("torch/distributed")[0], "ours is in the run's events"
    traces = [
        file.read_text() for file in tmp_path.glob("runs/*/events/rank1.jsonl") if "Traceback" in file.read_text()
    ]
    assert [str(tmp_path / "plain.py") in trace for trace in traces] == [True] * (script != BAD_INTERFACE)


@pytest.mark.long
def test_the_default_config_passes_on_two_ranks(tmp_path: Path) -> None:
    done = on_two_ranks(SCRIPT, tmp_path)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "PASSED: 3 PPO steps; 4 weight syncs" in done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["step", "step", "step", "final_check"]
    assert all(row["log_prob_difference_mean"] < 1e-5 for row in rows[:3])
    assert all(row["memory/max_rss"] > 0 for row in rows[:3])


@pytest.mark.long
def test_the_quickstart_passes_where_the_hosts_name_does_not_resolve(tmp_path: Path) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--uts"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    named = [*unshare, "sh", "-c", 'hostname no-such-host-0.invalid && exec "$@"', "sh"]
    done = subprocess.run(
        [*named, sys.executable, "launch/quickstart.py", "--run.steps", "1", "--run.dir", str(tmp_path / "run")],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "cannot be retrieved" not in done.stdout
