from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from harness.cluster import network
from harness.cluster.network import HostAddress, NetworkError, agree, choose, own_address, own_interfaces, variables
from harness.tools.repro.local_ranks import free_port

INTERFACES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.77.0.1", "fd77::1"],
    "ib0": ["192.168.5.7"],
    "eth1": ["10.78.0.1", "fd78::1"],
}


def chosen(
    wanted: str = "", variable: str = "", route: str = "10.77.0.1", reached: tuple[str, ...] = ()
) -> HostAddress:
    return choose(wanted, variable, INTERFACES, route, reached)


@pytest.mark.parametrize(
    ("arguments", "interface", "address"),
    [
        ({"route": "10.77.0.1"}, "eth0", "10.77.0.1"),
        ({"route": "fd78::1"}, "eth1", "fd78::1"),
        ({"wanted": "eth1"}, "eth1", "10.78.0.1"),
        ({"wanted": "eth1", "route": "fd77::1"}, "eth1", "fd78::1"),
        ({"wanted": "192.168.0.0/16"}, "ib0", "192.168.5.7"),
        ({"wanted": "fd78::/64"}, "eth1", "fd78::1"),
        ({"wanted": "10.78.0.1"}, "eth1", "10.78.0.1"),
        ({"variable": "ib0"}, "ib0", "192.168.5.7"),
        ({"variable": "ib0,eth1"}, "ib0", "192.168.5.7"),
        ({"variable": "ib0", "wanted": "eth1"}, "eth1", "10.78.0.1"),
        # Debian's /etc/hosts: the master's own name leads it to loopback, the others to its real address.
        ({"route": "127.0.1.1", "reached": ("10.77.0.1",)}, "eth0", "10.77.0.1"),
        ({"route": "127.0.0.1", "reached": ("10.99.0.9", "fd78::1")}, "eth1", "fd78::1"),
        ({"route": "127.0.1.1"}, "lo", "127.0.1.1"),
        ({"route": "127.0.0.1", "reached": ("127.0.0.1",)}, "lo", "127.0.0.1"),
    ],
)
def test_the_interface_that_is_asked_for_else_the_one_that_routes(
    arguments: dict[str, object], interface: str, address: str
) -> None:
    found = chosen(**arguments)  # type: ignore[arg-type]
    assert (found.interface, found.address) == (interface, address)


@pytest.mark.parametrize("arguments", [{"wanted": "eth9"}, {"wanted": "172.16.0.0/12"}, {"variable": "wlan0"}])
def test_an_interface_that_is_not_there_is_a_mistake_that_names_those_that_are(arguments: dict[str, str]) -> None:
    with pytest.raises(NetworkError, match=r"network\.interface|GLOO_SOCKET_IFNAME") as raised:
        chosen(**arguments)
    assert "eth0 (10.77.0.1, fd77::1)" in str(raised.value) and "ib0 (192.168.5.7)" in str(raised.value)


def test_variables_leave_what_the_user_has_set() -> None:
    own = HostAddress("eth0", "10.77.0.1", "")
    assert variables(own, {}) == {
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "SGLANG_HOST_IP": "10.77.0.1",
        "HOST_IP": "10.77.0.1",
    }
    assert "NCCL_SOCKET_IFNAME" not in variables(own, {"NCCL_SOCKET_IFNAME": "ib"})
    assert variables(HostAddress("eth0", "fd77::1", ""), {})["NCCL_SOCKET_FAMILY"] == "AF_INET6"


def test_own_interfaces_are_this_machines() -> None:
    found = own_interfaces()
    assert "127.0.0.1" in found["lo"]
    assert set(found) <= set(psutil.net_if_addrs())
    assert not any(address.startswith("fe80") for addresses in found.values() for address in addresses)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_own_address_for_a_loopback_master_is_loopback(address: str) -> None:
    if address == "::1" and not Path("/proc/net/if_inet6").read_text().strip():
        pytest.skip("this machine has no IPv6")
    master = {"MASTER_ADDR": address, "MASTER_PORT": "29500"}
    assert own_address(master) == address
    assert own_address(master | {"GLOO_SOCKET_IFNAME": "lo"}) in ("127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("published", "expected"), [("10.0.0.6", "10.0.0.6"), ("10.9.9.9", "10.0.0.5"), ("", "10.0.0.5")]
)
def test_of_two_addresses_of_an_interface_the_one_that_was_agreed_on_counts(
    published: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = {"eth0": ["192.168.1.5", "10.0.0.5", "10.0.0.6"]}
    monkeypatch.setattr(network, "own_interfaces", lambda: addresses)
    monkeypatch.setattr(network, "route_to_master", lambda environment: ("10.0.0.5", "10.0.0.1"))
    environment = {"GLOO_SOCKET_IFNAME": "eth0", "SGLANG_HOST_IP": published}
    assert own_address(environment) == expected


@pytest.fixture
def master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")


def test_an_interface_that_another_host_lacks_is_an_error_on_every_rank(master: None) -> None:
    store = dist.HashStore()
    for rank in (0, 1):
        store.set(f"route/{rank}", '["host/a/n", "127.0.0.1"]')
    with pytest.raises(NetworkError, match="rank 0: network.interface = nosuch0"):
        store.set("address/1", "{}")
        agree(store, 0, 2, "host/a/n", "nosuch0")
    with pytest.raises(NetworkError, match="rank 0: network.interface = nosuch0"):
        agree(store, 1, 2, "host/a/n", "lo")


def test_ranks_agree_on_every_hosts_address(master: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store = dist.HashStore()
    other = HostAddress("eth0", "10.77.0.2", "it routes to MASTER_ADDR")
    store.set("route/1", '["host1/b/n", "10.77.0.1"]')
    store.set("address/1", f'{{"interface": "eth0", "address": "{other.address}", "why": "{other.why}"}}')
    found = agree(store, 0, 2, "host0/a/n", "")
    assert list(found) == ["host0/a/n", "host1/b/n"]
    assert found["host1/b/n"] == other and found["host0/a/n"].interface == "lo"


def test_ranks_that_do_not_come_are_named(master: None) -> None:
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1))
    store.set("route/2", '["host1/b/n", "10.77.0.1"]')
    with pytest.raises(TimeoutError, match=r"these of 4 ranks did not report in time: \[1, 3\]"):
        agree(store, 0, 4, "host0/a/n", "")
