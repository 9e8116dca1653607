"""launch/hosts.py with torchrun and gloo between the hosts."""

from pathlib import Path

import pytest

from tests.tools.hosts.hosts import LAUNCH, needs_namespaces, run

WORKER = str(Path(__file__).resolve().parent / "worker_all_reduce.py")


@needs_namespaces
def test_an_all_reduce_over_two_hosts_of_two_ranks() -> None:
    answer = run("--hosts", "2", "--ranks-per-host", "2", "--", WORKER, launcher=LAUNCH)
    assert answer.code == 0, answer.output
    found = {host: answer.json_of(host) for host in ("host0", "host1")}
    assert [(each["sum"], each["host"]) for host, some in found.items() for each in some if each["host"] == host] == [
        *[([10.0], "host0")] * 2,
        *[([10.0], "host1")] * 2,
    ]
    assert sorted(each["rank"] for some in found.values() for each in some) == [0, 1, 2, 3]


@pytest.mark.long
def test_the_exit_code_is_that_of_the_rank_that_failed_first() -> None:
    answer = run("--patience", "0", "--", WORKER, "--fail", "1", "125", launcher=LAUNCH)
    assert answer.code == 125, answer.output
