"""The network between the hosts: one process that holds every host's TUN descriptors and routes packets by destination.

Its switch is pure: packets and times go in, packets that are due come out. A packet to an address that no host has is
lost, as on a network without a router.
"""

import errno
import heapq
import itertools
import json
import os
import random
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from ipaddress import ip_address

from harness.tools.hosts import kernel
from harness.tools.hosts.harms import Conditions

PACKET_BYTES = 65536
BURST_PACKETS = 64  # read from one host before the next has its turn
QUEUE_SECONDS = 0.5  # of packets that wait for a link of limited bandwidth; more are dropped
QUEUE_PACKETS = 32  # at least so many of the largest packet wait nevertheless


def destination(packet: bytes) -> bytes:
    """Packed destination address of an IPv4 or IPv6 packet; empty for anything else, or one cut short."""
    version = packet[0] >> 4 if packet else 0
    if version == 4 and len(packet) >= 20:
        return packet[16:20]
    return packet[24:40] if version == 6 and len(packet) >= 40 else b""


@dataclass(slots=True)
class Switch:
    """Where each packet goes, and when. Times are seconds of one clock, whichever."""

    hosts: Mapping[str, tuple[str, ...]]
    """Addresses by host."""
    conditions: Conditions
    cut: set[str] = field(default_factory=set)
    """Hosts that no packet reaches or leaves."""
    _routes: dict[bytes, str] = field(init=False)
    _chance: random.Random = field(init=False)
    _sent: dict[str, float] = field(init=False)
    _received: dict[str, float] = field(init=False)
    _waiting: list[tuple[float, int, str, str, bytes]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._routes = {ip_address(text).packed: host for host, own in self.hosts.items() for text in own}
        self._chance = random.Random(self.conditions.seed)
        self._sent = dict.fromkeys(self.hosts, 0.0)
        self._received = dict.fromkeys(self.hosts, 0.0)

    def forward(self, source: str, packet: bytes, now: float) -> str | None:
        """The host that gets this packet of `source` at once; None where it is lost, or waits until it is due."""
        target = self._routes.get(destination(packet))
        if target is None or source in self.cut or target in self.cut:
            return None
        if not self.conditions.any:
            return target
        if self.conditions.loss and self._chance.random() < self.conditions.loss:
            return None
        at = self._through(source, target, len(packet), now)
        if at is not None:
            heapq.heappush(self._waiting, (at + self.conditions.latency, next(self._order), source, target, packet))
        return None

    def due(self, now: float) -> Iterator[tuple[str, bytes]]:
        """Host and packet of all that have arrived by now, in the order of arrival."""
        while self._waiting and self._waiting[0][0] <= now:
            _, _, source, target, packet = heapq.heappop(self._waiting)
            if source not in self.cut and target not in self.cut:
                yield target, packet

    def next_due(self) -> float | None:
        """When the next packet arrives."""
        return self._waiting[0][0] if self._waiting else None

    def _through(self, source: str, target: str, size: int, now: float) -> float | None:
        """When the packet is through the sender's link and the receiver's; None where a queue is full.

        The receiver's link begins with a packet as soon as the sender's does, so that the two take one packet's time.
        """
        if not self.conditions.bandwidth:
            return now
        takes = size * 8 / self.conditions.bandwidth
        sent = max(now, self._sent[source]) + takes
        received = max(sent, self._received[target] + takes)
        if received - now > max(QUEUE_SECONDS, QUEUE_PACKETS * PACKET_BYTES * 8 / self.conditions.bandwidth):
            return None
        self._sent[source], self._received[target] = sent, received
        return received


@dataclass(slots=True)
class Wire:
    """The switch at its descriptors."""

    switch: Switch
    ports: Mapping[int, str]
    """Host by descriptor, decoys included."""
    doors: Mapping[str, int]
    """Descriptor by which a host's packets go in."""

    def serve(self, control: socket.socket) -> None:
        """Forward until the other end of the control socket closes. Each message there is {"cut": host}."""
        poll = select.epoll()
        for descriptor in (control.fileno(), *self.ports):
            poll.register(descriptor, select.EPOLLIN)
        while True:
            next_due = self.switch.next_due()
            timeout = None if next_due is None else max(0.0, next_due - time.monotonic())
            for descriptor, _ in poll.poll(timeout):
                if descriptor != control.fileno():
                    self._drain(descriptor)
                elif not self._obey(control):
                    return
            for host, packet in self.switch.due(time.monotonic()):
                self._deliver(host, packet)

    def _drain(self, descriptor: int) -> None:
        source = self.ports[descriptor]
        now = time.monotonic()
        for _ in range(BURST_PACKETS):
            try:
                packet = os.read(descriptor, PACKET_BYTES)
            except BlockingIOError:
                return
            target = self.switch.forward(source, packet, now)
            if target is not None:
                self._deliver(target, packet)

    def _deliver(self, host: str, packet: bytes) -> None:
        try:
            os.write(self.doors[host], packet)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EAGAIN, errno.ENOBUFS):  # interface down, or full: packets get lost
                raise

    def _obey(self, control: socket.socket) -> bool:
        message = control.recv(PACKET_BYTES)
        if not message:
            return False
        self.switch.cut.add(json.loads(message)["cut"])
        control.send(b"done")
        return True


@dataclass(frozen=True, slots=True)
class WireSpec:
    """What the wire's process is told."""

    conditions: Conditions
    addresses: Mapping[str, tuple[str, ...]]
    """By host: those of the network that joins the hosts."""
    ports: Mapping[str, tuple[int, ...]]
    """By host: its interfaces' descriptors; the last is the one that joins the hosts."""

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


def main(control: socket.socket, text: str) -> None:
    """Serve until the launcher is gone."""
    kernel.die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends it, after the hosts
    spec = json.loads(text)
    switch = Switch({host: tuple(own) for host, own in spec["addresses"].items()}, Conditions(**spec["conditions"]))
    ports = {descriptor: host for host, own in spec["ports"].items() for descriptor in own}
    Wire(switch, ports, {host: own[-1] for host, own in spec["ports"].items()}).serve(control)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
