"""Heartbeats between the hosts of a job: which host is silent, where its ranks are, and what failed there.

UDP, because a lost host must not block the others, and because torchrun's store is gone when its own host is. Any
process on the network can send a datagram here. A beat counts only if it carries the HMAC of the run's key, is
addressed to this host, and is newer than the last one of its sender.
"""

import hmac
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec

from harness.tools.watchdog.failures import Node, Place, RunFailure

BEAT_SECONDS = 1.0
LARGEST_BEAT = 60_000
FAILURES_IN_BEAT = 4  # the first ones of a host; more might not fit into a datagram
MOST_AT_ONCE = 10_000  # datagrams read in one go: a flood must not keep the watchdog from its other work
LAST_BEAT = 1 << 40  # a number above every beat that a watchdog sends
_DIGEST, _DIGEST_BYTES = "sha256", 32


class Beat(msgspec.Struct, frozen=True):
    """What one host sends to another one."""

    to: int  # index of the receiver
    node: int  # index of the sender
    count: int
    places: dict[int, Place]
    failures: tuple[RunFailure, ...]  # their times are relative to the moment of sending: clocks of hosts differ
    left: bool


_DECODER = msgspec.json.Decoder(Beat)


@dataclass(slots=True)
class Peer:
    """What is known of the watchdog of another host."""

    node: Node
    heard: float | None = None  # time of its last beat, in UNIX seconds of our clock; None: never
    left: bool = False  # it reported that it exits
    lost: bool = False
    places: dict[int, Place] = field(default_factory=dict)
    failures: list[RunFailure] = field(default_factory=list)
    count: int = 0  # number of its last beat

    def hear(self, beat: Beat, now: float) -> None:
        """Process its beat, unless it is older than the last one or repeats it."""
        if beat.count <= self.count:
            return
        self.heard, self.count = now, beat.count
        self.places, self.left = beat.places, self.left or beat.left
        if len(beat.failures) > len(self.failures):
            self.failures = [replace(each, time=now + each.time) for each in beat.failures]


@dataclass(slots=True)
class Heartbeats:
    """Heartbeats to and from the other hosts, over one UDP socket that does not block."""

    socket: socket.socket
    nodes: Sequence[Node]
    own: int  # index of this host in nodes, which is the same on all hosts
    key: bytes  # of this run; only its ranks and watchdogs know it
    lost_seconds: float
    now: Callable[[], float]
    peers: dict[int, Peer] = field(init=False)
    count: int = 0

    def __post_init__(self) -> None:
        self.peers = {index: Peer(node) for index, node in enumerate(self.nodes) if index != self.own}

    def beat(self, places: Mapping[int, Place], failures: Sequence[RunFailure], left: bool = False) -> None:
        """Send where our ranks are, and what failed here, to every host that still listens."""
        self.count += 1
        relative = tuple(replace(each, time=each.time - self.now()) for each in failures[:FAILURES_IN_BEAT])
        for index, peer in self.peers.items():
            if not peer.left and (target := peer.node.address):
                data = msgspec.json.encode(Beat(index, self.own, self.count, dict(places), relative, left))
                if self.socket.family == socket.AF_INET6 and ":" not in target:
                    target = f"::ffff:{target}"
                with suppress(OSError):  # a cut link or no route: the receiver notices that the beat is missing
                    signature = hmac.digest(self.key, data, _DIGEST)
                    self.socket.sendto(signature + data, (target, peer.node.port))

    def listen(self) -> None:
        """Process all beats that have arrived."""
        for _ in range(MOST_AT_ONCE):
            try:
                received = self.socket.recv(LARGEST_BEAT)
            except OSError:  # nothing more, or the network's error for an earlier beat, which silence shows better
                return
            signature, data = received[:_DIGEST_BYTES], received[_DIGEST_BYTES:]
            if not hmac.compare_digest(signature, hmac.digest(self.key, data, _DIGEST)):
                continue
            with suppress(msgspec.MsgspecError, ValueError, RecursionError):  # another version of this code
                beat = _DECODER.decode(data)
                if beat.to == self.own and beat.node in self.peers:
                    self.peers[beat.node].hear(beat, self.now())

    def failures(self) -> list[RunFailure]:
        return [failure for peer in self.peers.values() for failure in peer.failures]

    def newly_lost(self) -> list[Peer]:
        """Return the hosts that were heard, are silent for too long, and were not returned before."""
        late = [
            peer
            for peer in self.peers.values()
            if peer.heard is not None and not (peer.left or peer.lost) and self.now() - peer.heard > self.lost_seconds
        ]
        for peer in late:
            peer.lost = True
        return late

    def all_heard_since(self, moment: float) -> bool:
        """Return whether each host that ever sent a beat has sent one since, or is known to be gone."""
        return all(peer.heard is None or peer.left or peer.lost or peer.heard > moment for peer in self.peers.values())

    def silent(self) -> list[Node]:
        """Return the hosts that were never heard."""
        return [peer.node for peer in self.peers.values() if peer.heard is None]


def open_heartbeat_socket() -> socket.socket:
    """Open a UDP socket on every address of this host, IPv4 and IPv6 if the kernel has both."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    beats = socket.socket(family, socket.SOCK_DGRAM)
    if family == socket.AF_INET6:
        beats.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    beats.bind(("", 0))
    beats.setblocking(False)
    return beats
