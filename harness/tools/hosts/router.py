"""The network between the hosts: one thread that holds every host's TUN descriptors and routes packets by destination.

PacketSwitch is pure: packets and times go in, packets that are due come out. A packet to an address that no host has is
lost, as on a network without a router.
"""

import errno
import heapq
import itertools
import os
import random
import select
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address

from harness.tools.hosts.host_plan import LinkConditions

PACKET_BYTES = 65536
BURST_PACKETS = 64  # read from one host before the next has its turn
QUEUE_SECONDS = 0.5  # of packets that wait for a link of limited bandwidth; more are dropped
QUEUE_PACKETS = 32  # at least so many of the largest packet wait nevertheless


def destination(packet: bytes) -> bytes:
    """Return the packed destination address of an IPv4 or IPv6 packet; empty for anything else, or one cut short."""
    version = packet[0] >> 4 if packet else 0
    if version == 4 and len(packet) >= 20:
        return packet[16:20]
    return packet[24:40] if version == 6 and len(packet) >= 40 else b""


class PacketSwitch:
    """Where each packet goes, and when. Times are seconds of one clock, whichever. hosts: addresses by host."""

    def __init__(self, hosts: Mapping[str, tuple[str, ...]], conditions: LinkConditions) -> None:
        self.conditions = conditions
        self.cut: set[str] = set()
        """Hosts that no packet reaches or leaves."""
        self._routes = {ip_address(text).packed: host for host, own in hosts.items() for text in own}
        self._chance = random.Random(conditions.seed)
        self._sent = dict.fromkeys(hosts, 0.0)
        self._received = dict.fromkeys(hosts, 0.0)
        self._waiting: list[tuple[float, int, str, str, bytes]] = []
        self._order = itertools.count()

    def forward(self, source: str, packet: bytes, now: float) -> None:
        """Take a packet that a host has sent."""
        target, asked = self._routes.get(destination(packet)), self.conditions
        if (
            target is None
            or source in self.cut
            or target in self.cut
            or (asked.loss and self._chance.random() < asked.loss)
        ):
            return
        at = self._through(source, target, len(packet), now)
        if at is not None:
            heapq.heappush(self._waiting, (at + asked.latency, next(self._order), source, target, packet))

    def due(self, now: float) -> Iterator[tuple[str, bytes]]:
        """Yield host and packet of all that have arrived by now, in the order of arrival."""
        while self._waiting and self._waiting[0][0] <= now:
            _, _, source, target, packet = heapq.heappop(self._waiting)
            if source not in self.cut and target not in self.cut:
                yield target, packet

    def next_due(self) -> float | None:
        """Return when the next packet arrives."""
        return self._waiting[0][0] if self._waiting else None

    def _through(self, source: str, target: str, size: int, now: float) -> float | None:
        """Return when the packet is through the sender's link and the receiver's; None if a queue is full.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Router:
    """The switch at its descriptors."""

    conditions: LinkConditions
    addresses: dict[str, tuple[str, ...]]
    """By host: those of the network that joins the hosts."""
    ports: dict[str, tuple[int, ...]]
    """By host: its interfaces' descriptors; the last is the one that joins the hosts, the others are decoys."""

    def serve(self, control: socket.socket) -> None:
        """Forward until the other end of the control socket closes. Each message there is a host to cut off, and answered."""
        switch = PacketSwitch(self.addresses, self.conditions)
        hosts = {descriptor: host for host, own in self.ports.items() for descriptor in own}
        poll = select.epoll()
        for descriptor in (control.fileno(), *hosts):
            poll.register(descriptor, select.EPOLLIN)
        with control:  # the launcher sees its end, even if this fails
            while True:
                next_due = switch.next_due()
                ready = dict(poll.poll(None if next_due is None else max(0.0, next_due - time.monotonic())))
                self._deliver(switch)
                for descriptor in ready.keys() & hosts.keys():
                    with suppress(BlockingIOError):
                        for _ in range(BURST_PACKETS):
                            switch.forward(hosts[descriptor], os.read(descriptor, PACKET_BYTES), time.monotonic())
                            self._deliver(switch)  # at once: a burst in memory halves the throughput
                if control.fileno() in ready:
                    if not (message := control.recv(PACKET_BYTES)):
                        return
                    switch.cut.add(message.decode())
                    control.send(b"done")

    def _deliver(self, switch: PacketSwitch) -> None:
        """Write each packet that is due to its host."""
        for host, packet in switch.due(time.monotonic()):
            try:
                os.write(self.ports[host][-1], packet)
            except OSError as error:  # interface down, or full: packets get lost
                if error.errno not in (errno.EIO, errno.EAGAIN, errno.ENOBUFS):
                    raise
