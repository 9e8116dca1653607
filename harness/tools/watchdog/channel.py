"""How a watchdog gets its messages: from ranks of its host over a private Unix socket, from other hosts over UDP.

A rank's message is a packet with a JSON object, which is checked field by field. The socket is in a folder that no
other user can enter, and the kernel's credentials are checked at both ends.

Once the ranks have met (Met), hosts send each other a heartbeat each second: where their ranks are, and what failed. By
UDP, because a lost host must not block the others, and because torchrun's store is gone when its own host is. Any
process on the network can send a datagram here, so a beat counts only if it carries the HMAC of the run's key, is
addressed to this host, and is newer than the last one of its sender.
"""

import hmac
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import msgspec

from harness.runtime.failure import Failure
from harness.runtime.files import make_run_folder, run_folders
from harness.tools.watchdog.failures import Node, Place

FILE = "ranks"
LONGEST_MESSAGE = 1 << 18  # bytes: more than what the kernel lets an unprivileged process send in one packet
BEAT_SECONDS = 1.0
LARGEST_BEAT = 60_000
FAILURES_IN_BEAT = 4  # the first ones of a host; more might not fit into a datagram
MOST_AT_ONCE = 10_000  # datagrams read in one go: a flood must not keep the watchdog from its other work
FAREWELLS, FAREWELL_SECONDS = 5, 0.02  # last beats, of which one must arrive, and the time between two
_DIGEST, _DIGEST_BYTES = "sha256", 32


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchdogSettings:
    """What a watchdog must know about the run; the same for all ranks of a torchrun."""

    host: str  # name for people
    world_size: int
    local_world_size: int
    heartbeat_timeout: float
    stopped_seconds: float  # a process may be stopped for so long while its rank waits
    name: str = ""  # of the watchdog
    launcher: int = 0  # pid of what started the ranks, usually torchrun
    is_torchrun: bool = False  # whether the watchdog may end it
    holds: int | None = None  # the watchdog's descriptor by which launch/torchrun.py waits for it (runtime/errors.py)


class Message(msgspec.Struct, forbid_unknown_fields=True, tag_field="say"):
    """What a rank may send."""


class Hello(Message, tag="hello"):
    """The first message of a rank. handler: its descriptor for the memory into which its faulthandler writes."""

    rank: int
    handler: int | None


class Moved(Message, tag="moved"):
    """The rank has begun or left a phase.

    due: when the time limit that is the first to pass will have passed, by time.monotonic(), which is the same for all
    processes of a host; None for no limit. limit: its length in seconds.
    """

    place: Place
    begins: bool
    due: float | None
    limit: float


class Failed(Message, tag="failed"):
    """What is about to end the rank: an error, one that may follow from another rank's, or SIGINT."""

    kind: Literal["exception", "echo", "told"]
    error: str
    trace: tuple[str, ...] = ()


class Exits(Message, tag="bye"):
    """The rank is about to exit on its own with this code."""

    code: int


class Flush(Message, tag="flush"):
    """Ask for an answer once the other hosts have been sent a beat."""


class Met(Message, tag="peers"):
    """All ranks have met. own: index of this launcher in nodes; key: of the heartbeats; folder: the run directory;
    launcher: its name (World.launcher).

    Its answer comes once the hosts hear each other.
    """

    nodes: tuple[Node, ...]
    own: int
    key: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})+$")]
    folder: str
    launcher: str

    def __post_init__(self) -> None:
        if not 0 <= self.own < len(self.nodes):
            raise ValueError("own is out of range")


_DECODER = msgspec.json.Decoder(Hello | Moved | Failed | Exits | Flush | Met)


class MalformedError(ValueError):
    """A packet is not a valid message of a rank."""


def parse(packet: bytes) -> Message:
    """Return the message of a rank. Raise MalformedError."""
    try:
        return _DECODER.decode(packet)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedError(f"a malformed message ({error})") from error


def listen(name: str) -> socket.socket:
    """Return a socket that listens in a new folder of the run, as scratch names it.

    name: of the run on this host, the same for all ranks that connect.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(make_run_folder(name) / FILE))
    listener.listen()
    return listener


def connect(name: str) -> socket.socket | None:
    """Return a connection to the process of this user that listens under this name; None if there is none yet."""
    for folder in run_folders(name):
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with suppress(OSError):  # a folder without a socket
            line.connect(str(folder / FILE))
            if peer_of(line)[1] == os.geteuid():
                return line
        line.close()
    return None


def peer_of(line: socket.socket) -> tuple[int, int]:
    """Return the kernel's pid and uid of the other end; pid 0 if it is in a pid namespace that is not visible here."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


class Beat(msgspec.Struct, frozen=True):
    """What one host sends to another one."""

    to: int  # index of the receiver
    node: int  # index of the sender
    count: int
    places: dict[int, Place]
    failures: tuple[Failure, ...]  # their times are relative to the moment of sending: clocks of hosts differ
    left: bool


_BEATS = msgspec.json.Decoder(Beat)


@dataclass(slots=True)
class Peer:
    """What is known of the watchdog of another host."""

    node: Node
    heard: float | None = None  # time of its last beat, in UNIX seconds of our clock; None: never
    left: bool = False  # it reported that it exits
    lost: bool = False
    places: dict[int, Place] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
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
    met: Met
    lost_seconds: float
    now: Callable[[], float]
    peers: dict[int, Peer] = field(init=False)
    count: int = 0

    def __post_init__(self) -> None:
        self.peers = {index: Peer(node) for index, node in enumerate(self.met.nodes) if index != self.met.own}

    def beat(self, places: Mapping[int, Place], failures: Sequence[Failure], left: bool = False) -> None:
        """Send where our ranks are, and what failed here, to every host that still listens."""
        self.count += 1
        relative = tuple(replace(each, time=each.time - self.now()) for each in failures[:FAILURES_IN_BEAT])
        for index, peer in self.peers.items():
            if not peer.left and (target := peer.node.address):
                data = msgspec.json.encode(Beat(index, self.met.own, self.count, dict(places), relative, left))
                if self.socket.family == socket.AF_INET6 and ":" not in target:
                    target = f"::ffff:{target}"
                with suppress(OSError):  # a cut link or no route: the receiver notices that the beat is missing
                    self.socket.sendto(self._signature(data) + data, (target, peer.node.port))

    def say_farewell(self, places: Mapping[int, Place], failures: Sequence[Failure], left: bool = False) -> None:
        """Send the last beat several times, because UDP may lose one."""
        for _ in range(FAREWELLS):
            self.beat(places, failures, left)
            time.sleep(FAREWELL_SECONDS)

    def listen(self) -> None:
        """Process all beats that have arrived."""
        for _ in range(MOST_AT_ONCE):
            try:
                received = self.socket.recv(LARGEST_BEAT)
            except OSError:  # nothing more, or the network's error for an earlier beat, which silence shows better
                return
            signature, data = received[:_DIGEST_BYTES], received[_DIGEST_BYTES:]
            if not hmac.compare_digest(signature, self._signature(data)):
                continue
            with suppress(msgspec.MsgspecError, ValueError, RecursionError):  # another version of this code
                beat = _BEATS.decode(data)
                if beat.to == self.met.own and beat.node in self.peers:
                    self.peers[beat.node].hear(beat, self.now())

    def _signature(self, data: bytes) -> bytes:
        return hmac.digest(bytes.fromhex(self.met.key), data, _DIGEST)

    def failures(self) -> list[Failure]:
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
