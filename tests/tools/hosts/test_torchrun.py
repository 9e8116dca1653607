"""launch/hosts.py with torchrun and gloo between the hosts."""

from pathlib import Path

import pytest

from tests.tools.hosts.hosts import LAUNCH, needs_namespaces, run

WORKER = str(Path(__file__).resolve().parent / "worker_all_reduce.py")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), marks=needs_namespaces),
        pytest.param(
            ("--network", "ipv6", "--rendezvous", "static", "--master", "hostname", "--interfaces", "2"),
            marks=(needs_namespaces, pytest.mark.long),
        ),
        pytest.param(("--isolation", "processes"), marks=pytest.mark.long),
    ],
)
def test_an_all_reduce_over_two_hosts_of_two_ranks(words: tuple[str, ...]) -> None:
    answer = run(*words, "--hosts", "2", "--ranks-per-host", "2", "--", WORKER, launcher=LAUNCH)
    assert answer.code == 0, answer.output
    found = [each for host in ("host0", "host1") for each in answer.json_of(host)]
    assert [each["sum"] for each in found] == [[10.0]] * 4
    assert sorted(each["rank"] for each in found) == [0, 1, 2, 3]
    if "processes" not in words:
        assert {each["host"] for each in answer.json_of("host1")} == {"host1"}


@pytest.mark.long
def test_the_exit_code_is_that_of_the_rank_that_failed_first() -> None:
    answer = run("--patience", "0", "--", WORKER, "--fail", "1", "125", launcher=LAUNCH)
    assert answer.code == 125, answer.output
