"""Real hosts in namespaces: what each has of its own, and how the network between them behaves."""

import subprocess

import pytest

from tests.tools.hosts.hosts import ON_HOST, command, needs_namespaces, run

pytestmark = needs_namespaces


def test_each_host_has_a_name_a_boot_a_network_processes_and_shared_memory_of_its_own() -> None:
    answer = run("--network", "both", "--interfaces", "2", "--", ON_HOST, "identity")
    assert answer.code == 0, answer.output
    (first,), (second,) = answer.json_of("host0"), answer.json_of("host1")
    assert (first["hostname"], second["hostname"]) == ("host0", "host1")
    assert first["boot_id"] != second["boot_id"]
    assert (first["shm"], second["shm"]) == ({"mine": "0"}, {"mine": "1"})
    assert first["tmpdir"] != second["tmpdir"]
    assert first["processes"] < 5
    assert sorted(first["interfaces"]) == first["sysfs"] == ["eth0", "eth1", "lo"]
    assert first["hosts"] == second["hosts"]
    assert (first["own"], second["own"]) == (["10.77.0.1", "fd77::1"], ["10.77.0.2", "fd77::2"])


def test_hosts_reach_each_other_by_name() -> None:
    answer = run("--network", "ipv6", "--interfaces", "3", "--", ON_HOST, "ping", "host0")
    assert answer.code == 0, answer.output
    (found,) = answer.json_of("host1")
    assert (found["peer"], found["own"]) == ("fd77::1", "fd77::2")
    assert min(found["trips"]) < 0.5


@pytest.mark.parametrize(
    ("fault", "said", "code"), [("--kill", "killed host1", 1), ("--cut", "cut host1 from the others", 0)]
)
def test_a_host_falls_silent_before_the_phase_of_its_fault_begins(fault: str, said: str, code: int) -> None:
    answer = run(fault, "host1@sync:1", "--", ON_HOST, "phases", "10.77.0.1")
    assert [found["got"] for found in answer.json_of("host0")] == ["0", "silence"], answer.output
    assert any(line.startswith(f"hosts: {said} at sync of step 1 (") for line in answer.console)
    assert answer.code == code


@pytest.mark.long
def test_two_emulations_stand_side_by_side() -> None:
    words = ("--", ON_HOST, "ping", "host0")
    other = subprocess.Popen(command(*words), stdout=subprocess.PIPE, text=True)
    assert run(*words).code == 0
    other.communicate(timeout=60)
    assert other.returncode == 0
