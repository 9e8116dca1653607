"""Real hosts in namespaces: what each has of its own, and how the network between them behaves."""

import re
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


@pytest.mark.long
def test_debian_hosts_take_their_own_name_for_loopback() -> None:
    answer = run("--debian-hosts", "--", ON_HOST, "identity")
    assert answer.json_of("host1")[0]["hosts"].startswith("127.0.1.1 host1\n"), answer.output
    assert "127.0.1.1" in answer.json_of("host1")[0]["own"]


@pytest.mark.parametrize(
    ("network", "first", "second"),
    [pytest.param("ipv4", "10.77.0.1", "10.77.0.2", marks=pytest.mark.long), ("ipv6", "fd77::1", "fd77::2")],
)
def test_hosts_reach_each_other_by_name(network: str, first: str, second: str) -> None:
    answer = run("--network", network, "--interfaces", "3", "--", ON_HOST, "ping", "host0")
    assert answer.code == 0, answer.output
    (found,) = answer.json_of("host1")
    assert (found["peer"], found["own"]) == (first, second)
    assert min(found["trips"]) < 0.5


def test_a_cut_link_swallows_every_packet_from_then_on() -> None:
    answer = run("--cut", "host1@3s", "--", ON_HOST, "datagrams", "10.77.0.1", "600", "0.01")
    assert answer.code == 0, answer.output
    came = answer.json_of("host0")[0]["came"]
    assert came == list(range(len(came)))
    assert 20 < len(came) < 600
    said = re.compile(r"hosts: cut host1 from the others 3 s after the start \((\d+\.\d)")
    [seconds] = [float(match[1]) for match in map(said.match, answer.console) if match]
    assert seconds >= 3


def test_a_host_killed_at_a_phase_falls_silent_before_the_phase_begins() -> None:
    answer = run("--kill", "host1@sync:1", "--", ON_HOST, "phases", "10.77.0.1")
    assert [found["got"] for found in answer.json_of("host0")] == ["0", "silence"], answer.output
    assert any(line.startswith("hosts: killed host1 at sync of step 1 (") for line in answer.console)
    assert answer.code == 1


@pytest.mark.long
def test_a_cut_at_a_phase_comes_before_its_work() -> None:
    answer = run("--cut", "host1@sync:1", "--", ON_HOST, "phases", "10.77.0.1")
    assert [found["got"] for found in answer.json_of("host0")] == ["0", "silence"], answer.output
    assert any(line.startswith("hosts: cut host1 from the others at sync of step 1 (") for line in answer.console)


def test_a_fault_that_never_happens_is_a_mistake() -> None:
    answer = run("--kill", "host1@validate", "--", ON_HOST, "phases", "10.77.0.1")
    assert answer.code == 2
    assert any("kill host1 at validate never happened" in line for line in answer.console)


@pytest.mark.long
def test_two_emulations_stand_side_by_side() -> None:
    words = ("--", ON_HOST, "ping", "host0")
    other = subprocess.Popen(command(*words), stdout=subprocess.PIPE, text=True)
    assert run(*words).code == 0
    other.communicate(timeout=60)
    assert other.returncode == 0
