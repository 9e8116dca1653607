"""Properties of ports:

- blocks of one host, whatever the two base ports, are the same or disjoint;
- every port of a block, and so every one that SGLang derives from it, is within 1024..65535;
- leases held at one time, by one process or several, have different blocks; a closed, ended or killed holder's block
  is free again; a port that anything listens on is never leased.

Other programs may hold ports of this machine, so tests say which blocks must differ, not which numbers come out.
"""

import errno
import os
import signal
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cluster.ports import PORTS_PER_ENGINE, EnginePorts, PortLease, planned_ports

ROOT = Path(__file__).parents[2]
HOLD = """
import os, sys
from harness.cluster.ports import PortLease
os.setuid(int(sys.argv[2]))
lease = PortLease(int(sys.argv[1]))
print(lease.ports.port, flush=True)
sys.stdin.read()
"""


@settings(deadline=None, max_examples=25)
@given(st.integers(1024, 65000), st.integers(0, 10), st.integers(1024, 65000), st.integers(0, 10))
def test_blocks_are_the_same_or_disjoint(base: int, index: int, other_base: int, other_index: int) -> None:
    ours, theirs = planned_ports(base, index), planned_ports(other_base, other_index)
    assert ours == theirs or abs(ours.port - theirs.port) >= PORTS_PER_ENGINE
    assert base + index * PORTS_PER_ENGINE <= ours.port < base + (index + 1) * PORTS_PER_ENGINE


@settings(deadline=None, max_examples=25)
@given(st.integers(1024, 65535), st.integers(0, 2000))
def test_every_port_of_a_block_is_a_port(base: int, index: int) -> None:
    try:
        ports = planned_ports(base, index)
    except ValueError as error:
        assert base + (index + 2) * PORTS_PER_ENGINE > 65535
        assert f"engine.base_port = {base} is too high: engine {index} of the host needs 32 ports" in str(error)
        return
    assert 1024 <= ports.port < ports.nccl_port < ports.dist_init_port
    # SGLang's handshake of DP attention, the farthest port it derives.
    assert ports.dist_init_port + 13 < ports.port + PORTS_PER_ENGINE <= 65536


def test_the_default_base_port_is_the_first_port() -> None:
    assert planned_ports(30000, 0) == EnginePorts(30000, nccl_port=30004, dist_init_port=30008, update_group_port=30028)
    assert planned_ports(30000, 2).port == 30064


@pytest.mark.parametrize("base_port", [-1, 0, 80, 1023, 65536])
def test_impossible_base_ports_are_refused(base_port: int) -> None:
    with pytest.raises(ValueError, match=rf"^engine\.base_port must be 1024 to 65535, got {base_port}$"):
        planned_ports(base_port, 0)


def test_leases_of_one_process_differ_and_come_back() -> None:
    with PortLease(20000) as first, PortLease(20000) as second, PortLease(20010) as third:
        assert len({first.ports.port, second.ports.port, third.ports.port}) == 3
        assert 20000 <= first.ports.port < second.ports.port
    with PortLease(20000) as again:
        assert again.ports == first.ports
        first.close()  # a second time, which leaves the next holder alone
        with PortLease(20000) as other:
            assert other.ports.port > again.ports.port


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("listening", [True, False])
def test_a_block_with_a_taken_port_is_passed_over(family: socket.AddressFamily, listening: bool) -> None:
    if family == socket.AF_INET6 and not _has_ipv6():
        pytest.skip("this machine has no IPv6 loopback address")
    with PortLease(20000) as lease:
        planned = lease.ports
    with socket.socket(family, socket.SOCK_STREAM) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # A port that SGLang derives, on the loopback address alone.
        taken.bind(("127.0.0.1" if family == socket.AF_INET else "::1", planned.dist_init_port + 5))
        if listening:
            taken.listen()
        with PortLease(20000) as lease:
            assert lease.ports.port > planned.port


def test_a_lease_is_ports_that_can_be_bound_and_has_no_name_that_others_could_take() -> None:
    """Any local user can take the name of an abstract Unix socket, so the lease must be ports and nothing else."""
    before = _open_files()
    with PortLease(20000) as lease:
        own = _open_files() - before
        assert own
        named = {f"socket:[{line.split()[6]}]" for line in _lines("/proc/net/unix") if len(line.split()) > 7}
        assert not own & named
        for port in (lease.ports.port, lease.ports.nccl_port, lease.ports.dist_init_port):
            with socket.create_server(("", port)) as server:
                assert server.getsockname()[1] == port
        with socket.socket() as taken, pytest.raises(OSError, match="Address already in use"):
            taken.bind(("0.0.0.0", lease.ports.port + PORTS_PER_ENGINE - 1))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_ports_of_another_user_are_passed_over_and_come_back() -> None:
    with PortLease(20000) as lease:
        planned = lease.ports.port
    other = _hold(20000, user=65534)
    try:
        assert _port(other) == planned
        with PortLease(20000) as lease:
            assert lease.ports.port > planned
    finally:
        other.communicate("")
    with PortLease(20000) as lease:
        assert lease.ports.port == planned


def test_no_free_block_is_an_error() -> None:
    last = planned_ports(65535 - 2 * PORTS_PER_ENGINE, 0)
    with socket.create_server(("", last.nccl_port)):
        held = []
        with pytest.raises(
            OSError, match="has no 32 free ports in a block above it on this host; choose a lower"
        ) as raised:
            for _ in range(3):
                held.append(PortLease(last.port))
        assert raised.value.errno == errno.EADDRINUSE
        for lease in held:
            lease.close()


def _has_ipv6() -> bool:
    return Path("/proc/net/if_inet6").exists() and Path("/proc/net/if_inet6").read_text() != ""


def _open_files() -> set[str]:
    """What this process has open, by the names that the kernel gives: socket:[inode] of a socket."""
    links = [Path(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
    return {os.readlink(link) for link in links if link.is_symlink()}


def _lines(file: str) -> list[str]:
    return Path(file).read_text().splitlines()


def _hold(base_port: int, user: int = os.getuid()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(base_port), str(user)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_processes_that_start_at_once_get_different_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = []
    for base_port in (20000, 20000, 20001, 20000, 20031, 20000):
        monkeypatch.setenv("TMPDIR", str(tmp_path / str(len(processes))))  # two runs need not share a folder
        processes.append(_hold(base_port))
    try:
        ports = sorted(map(_port, processes))
        assert all(b - a >= PORTS_PER_ENGINE for a, b in pairwise(ports))
    finally:
        for process in processes:
            process.communicate("")


def test_a_killed_holder_frees_its_block() -> None:
    process = _hold(20000)
    port = _port(process)
    with PortLease(20000) as lease:
        assert lease.ports.port > port
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    with PortLease(20000) as lease:
        assert lease.ports.port == port
