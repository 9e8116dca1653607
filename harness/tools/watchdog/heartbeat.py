"""Beats between the hosts of a job over UDP: who is silent, where its ranks were, and by how much its clock is ahead.

Anyone may send us anything: a beat is read only where it carries the HMAC of the run's key, is meant for this host, and is
newer than the last one of its sender.
"""

import hmac
import json
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from harness.tools.watchdog.failure import Failure, Node, Place

BEAT_SECONDS = 1.0
LARGEST_BEAT = 60_000
TOLD_AT_ONCE = 4
"""Failures of one host that fit in a beat; the first ones count."""
MOST_AT_ONCE = 10_000
"""Datagrams that are read in one go: a stranger who floods us must not keep us from all else."""
_DIGEST, _DIGEST_BYTES = "sha256", 32


@dataclass(slots=True)
class Clock:
    """Wall time that goes on evenly, whatever sets the machine's clock meanwhile."""

    started: float = field(default_factory=time.time)
    _base: float = field(default_factory=time.monotonic)

    def now(self) -> float:
        """UNIX seconds."""
        return self.started + time.monotonic() - self._base


@dataclass(slots=True)
class Peer:
    """The watchdog of another host, as far as it was heard."""

    node: Node
    heard: float | None = None
    """When, in UNIX seconds of our clock; None: never."""
    left: bool = False
    """It said that it ends."""
    lost: bool = False
    places: dict[int, Place] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    echo: tuple[float, float] | None = None
    """When its last beat was sent, on its clock, and heard, on ours."""
    counted: int = 0
    """The number of its last beat."""
    _samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=16))
    """Round trip and offset, in seconds, of the last beats that carried an echo of ours."""

    @property
    def clock_ahead(self) -> float:
        """Seconds by which its clock is ahead of ours: that of the quickest round trip, as in NTP."""
        if self._samples:
            return min(self._samples)[1]
        return self.echo[0] - self.echo[1] if self.echo else 0.0

    def hear(self, beat: Mapping[str, Any], now: float) -> None:
        """Take what it said in; what was sent before the last one, or sent again, is not."""
        if int(beat["count"]) <= self.counted:
            return
        self.counted = int(beat["count"])
        sent = float(beat["sent"])
        if beat["echo"] is not None:
            ours_sent, they_heard = beat["echo"]
            offset = ((they_heard - ours_sent) + (sent - now)) / 2
            self._samples.append(((now - ours_sent) - (sent - they_heard), offset))
        self.heard, self.echo = now, (sent, now)
        self.places = {int(rank): Place(*place) for rank, place in beat["places"].items()}
        self.left = self.left or bool(beat["left"])
        if len(beat["failures"]) > len(self.failures):
            self.failures = [Failure.from_json(each, self.clock_ahead) for each in beat["failures"]]


@dataclass(slots=True)
class Heartbeats:
    """This host's side of the beats of all hosts, over one UDP socket that does not block."""

    socket: socket.socket
    nodes: Sequence[Node]
    own: int
    """Index of this host in nodes, which is the same on all hosts."""
    key: bytes
    """Of this run, which its ranks alone have."""
    lost_seconds: float
    now: Callable[[], float]
    peers: dict[int, Peer] = field(init=False)
    _count: int = 0

    def __post_init__(self) -> None:
        """Nobody has been heard."""
        self.peers = {index: Peer(node) for index, node in enumerate(self.nodes) if index != self.own}

    def beat(self, places: Mapping[int, Place], failures: Sequence[Failure], left: bool = False) -> None:
        """Tell every host that still listens where our ranks are, and what went wrong here."""
        self._count += 1
        said = {
            "node": self.own,
            "count": self._count,
            "places": {rank: [at.progress, at.phase, at.step, at.inside] for rank, at in places.items()},
            "failures": [failure.as_json() for failure in failures[:TOLD_AT_ONCE]],
            "left": left,
        }
        for index, peer in self.peers.items():
            if not peer.left and peer.node.address:
                beat = said | {"to": index, "sent": self.now(), "echo": peer.echo}
                target = peer.node.address
                if self.socket.family == socket.AF_INET6 and ":" not in target:
                    target = f"::ffff:{target}"
                # A link that is cut, or a host without a route: what is not sent is missed, and that is the message.
                with suppress(OSError):
                    self.socket.sendto(self._signed(json.dumps(beat).encode()), (target, peer.node.port))

    def listen(self) -> None:
        """Take in all that has come."""
        for _ in range(MOST_AT_ONCE):
            try:
                data = self.socket.recv(LARGEST_BEAT)
            except OSError:  # nothing more; or the network's word on an earlier beat, which silence will tell better
                return
            signature, said = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
            if not hmac.compare_digest(signature, hmac.digest(self.key, said, _DIGEST)):
                continue
            with suppress(
                ValueError, KeyError, TypeError, AttributeError, ArithmeticError
            ):  # a rank of ours, of another version
                beat = json.loads(said)
                if beat["to"] == self.own and beat["node"] in self.peers:
                    self.peers[beat["node"]].hear(beat, self.now())

    def _signed(self, said: bytes) -> bytes:
        return hmac.digest(self.key, said, _DIGEST) + said

    def failures(self) -> list[Failure]:
        """What the other hosts have said."""
        return [failure for peer in self.peers.values() for failure in peer.failures]

    def newly_lost(self) -> list[Peer]:
        """Hosts that were heard, are silent for too long, and were not returned before."""
        late = [
            peer
            for peer in self.peers.values()
            if peer.heard is not None and not (peer.left or peer.lost) and self.now() - peer.heard > self.lost_seconds
        ]
        for peer in late:
            peer.lost = True
        return late

    def all_heard_since(self, moment: float) -> bool:
        """Whether each host that ever spoke has spoken since, or is known to be gone."""
        return all(peer.heard is None or peer.left or peer.lost or peer.heard > moment for peer in self.peers.values())

    def silent(self) -> list[Node]:
        """Hosts that were never heard."""
        return [peer.node for peer in self.peers.values() if peer.heard is None]


def open_for_beats() -> socket.socket:
    """A UDP socket on every address of this host, IPv4 and IPv6, where the kernel has both."""
    if socket.has_dualstack_ipv6():
        beats = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        beats.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    else:
        beats = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    beats.bind(("", 0))
    beats.setblocking(False)
    return beats
