import random
import struct
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.tools.hosts.host_plan import LinkConditions
from harness.tools.hosts.router import QUEUE_SECONDS, PacketSwitch, destination

HOSTS = {"host0": ("10.77.0.1", "fd77::1"), "host1": ("10.77.0.2", "fd77::2"), "host2": ("10.77.0.3", "fd77::3")}


def packet(target: str, payload: int = 0) -> bytes:
    """An IPv4 or IPv6 packet as far as the switch reads it."""
    address = ip_address(target).packed
    if len(address) == 4:
        return struct.pack(">BxH8xi", 0x45, 20 + payload, 0) + address + bytes(payload)
    return struct.pack(">BxxxHBB16x", 0x60, payload, 59, 64) + address + bytes(payload)


def arrivals(switch: PacketSwitch, until: float) -> list[tuple[str, bytes]]:
    return list(switch.due(until))


@given(st.ip_addresses())
def test_the_destination_is_read_from_where_it_stands(address: object) -> None:
    assert destination(packet(str(address))) == ip_address(str(address)).packed


@given(st.binary(max_size=80))
def test_no_bytes_confuse_the_switch(data: bytes) -> None:
    assert len(destination(data)) in (0, 4, 16)
    PacketSwitch(HOSTS, LinkConditions()).forward("host0", data, 0.0)


@pytest.mark.parametrize("host", HOSTS)
def test_packets_go_to_the_host_of_their_address_at_once(host: str) -> None:
    switch = PacketSwitch(HOSTS, LinkConditions())
    for address in HOSTS[host]:
        switch.forward("host0", packet(address), 0.0)
        assert switch.next_due() == 0.0 and arrivals(switch, 0.0) == [(host, packet(address))]
    assert switch.next_due() is None


@pytest.mark.parametrize("address", ["10.77.0.9", "10.78.0.2", "fd78::2", "ff02::2", "224.0.0.1"])
def test_an_address_that_no_host_has_leads_nowhere(address: str) -> None:
    switch = PacketSwitch(HOSTS, LinkConditions())
    switch.forward("host0", packet(address), 0.0)
    assert switch.next_due() is None


def test_latency_delays_each_packet_and_keeps_their_order() -> None:
    switch = PacketSwitch(HOSTS, LinkConditions(latency=0.02))
    sent = [packet("10.77.0.2", payload) for payload in range(3)]
    for index, each in enumerate(sent):
        switch.forward("host0", each, 1.0 + index * 0.001)
    assert switch.next_due() == pytest.approx(1.02)
    assert arrivals(switch, 1.0199) == []
    assert arrivals(switch, 1.0211) == [("host1", each) for each in sent[:2]]
    assert arrivals(switch, 2.0) == [("host1", sent[2])]


def test_loss_is_the_same_for_the_same_seed() -> None:
    def lost(seed: int) -> list[int]:
        switch = PacketSwitch(HOSTS, LinkConditions(loss=0.1, seed=seed))
        got = []
        for number in range(2000):
            switch.forward("host0", packet("10.77.0.2"), float(number))
            got.append(len(arrivals(switch, float(number))))
        return got

    assert lost(1) == lost(1)
    assert lost(1) != lost(2)
    assert 0.07 < lost(1).count(0) / 2000 < 0.13


def test_bandwidth_is_a_time_for_each_byte_and_a_queue_that_ends() -> None:
    switch = PacketSwitch(HOSTS, LinkConditions(bandwidth=8e6))  # one byte a microsecond
    size = 10_000
    data = packet("10.77.0.2", size - 20)
    for _ in range(1000):
        switch.forward("host0", data, 0.0)
    assert len(arrivals(switch, 0.0999)) == 9
    assert len(arrivals(switch, 0.1001)) == 1
    waited = 10 + len(arrivals(switch, 100.0))
    assert QUEUE_SECONDS <= waited * size / 1e6 < 3.0  # the others were dropped


def test_bandwidth_holds_for_each_direction_and_each_receiver() -> None:
    switch = PacketSwitch(HOSTS, LinkConditions(bandwidth=8e6))
    for source, target in (("host0", "10.77.0.2"), ("host1", "10.77.0.1")):
        switch.forward(source, packet(target, 9980), 0.0)
    assert len(arrivals(switch, 0.01001)) == 2  # full duplex
    for source in ("host0", "host1"):
        switch.forward(source, packet("10.77.0.3", 9980), 1.0)
    assert len(arrivals(switch, 1.01001)) == 1  # both want the same receiver
    assert len(arrivals(switch, 1.02001)) == 1


@given(st.integers(0, 2**32), st.floats(0, 0.05), st.floats(1e6, 1e9))
def test_nothing_arrives_early_or_twice(seed: int, latency: float, bandwidth: float) -> None:
    switch = PacketSwitch(HOSTS, LinkConditions(latency=latency, bandwidth=bandwidth))
    chance = random.Random(seed)
    sent: dict[bytes, float] = {}
    now = 0.0
    for number in range(20):
        now += chance.random() * 0.001
        data = packet(HOSTS[f"host{chance.randrange(3)}"][number % 2], chance.randrange(4, 1400)) + struct.pack(
            "i", number
        )
        sent[data] = now
        switch.forward("host0", data, now)
    came = []
    while (due := switch.next_due()) is not None:
        for host, data in switch.due(due):
            assert due >= sent[data] + latency + len(data) * 8 / bandwidth - 1e-9
            assert any(ip_address(address).packed == destination(data) for address in HOSTS[host])
            came.append(data)
    assert sorted(came) == sorted(sent)


def test_a_cut_host_neither_sends_nor_gets_not_even_what_was_under_way() -> None:
    switch = PacketSwitch(HOSTS, LinkConditions(latency=1.0))
    switch.forward("host0", packet("10.77.0.2"), 0.0)
    switch.forward("host1", packet("10.77.0.1"), 0.0)
    switch.forward("host0", packet("10.77.0.3"), 0.0)
    switch.cut.add("host1")
    assert [host for host, _ in arrivals(switch, 5.0)] == ["host2"]
    plain = PacketSwitch(HOSTS, LinkConditions())
    plain.cut.add("host1")
    for source, address in (("host0", "fd77::2"), ("host1", "fd77::1"), ("host0", "fd77::3")):
        plain.forward(source, packet(address), 0.0)
    assert arrivals(plain, 0.0) == [("host2", packet("fd77::3"))]
