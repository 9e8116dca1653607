"""What a watchdog hears: ranks of its user and its torchrun, whatever they send, and beats of its run; nothing else."""

import hmac
import json
import os
import select
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.runtime import files
from harness.runtime.failure import Failure
from harness.tools.watchdog import channel
from harness.tools.watchdog.channel import (
    Heartbeats,
    MalformedError,
    Message,
    Met,
    WatchdogSettings,
    open_heartbeat_socket,
    parse,
)
from harness.tools.watchdog.failures import Node, Place
from harness.tools.watchdog.watchdog import Watchdog

NOT_US = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
# What another user tries: to reach the socket by its path, or one of their own in its place.
INTRUDER = """
import os, socket, sys
os.setgid({user}); os.setuid({user})
try:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(sys.argv[1])
    line.sendall(b'{{"say": "hello", "rank": 0, "handler": null}}')
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture
def listener() -> Iterator[tuple[socket.socket, Path, str]]:
    name = f"harness-test-{os.getpid()}-{time.monotonic_ns()}"
    made = channel.listen(name)
    yield made, Path(made.getsockname()).parent, name
    made.close()
    files.remove_run_folders(name)


def as_other_user(path: Path) -> str:
    code = INTRUDER.format(user=NOT_US)
    return subprocess.run([sys.executable, "-S", "-c", code, str(path)], capture_output=True, text=True).stdout.strip()


@pytest.fixture
def watched(listener: tuple[socket.socket, Path, str]) -> Callable[[int], Watchdog]:
    """Return a watchdog of two ranks that this process, or another one, has started; it hears when it serves."""
    made, _, name = listener
    settings = WatchdogSettings(
        host="host0",
        world_size=2,
        local_world_size=2,
        heartbeat_timeout=10.0,
        stopped_seconds=60.0,
        name=name,
    )

    def make(launcher: int) -> Watchdog:
        return Watchdog(settings, psutil.Process(launcher), made, None)

    return make


def hello(rank: int) -> bytes:
    return json.dumps({"say": "hello", "rank": rank, "handler": None}).encode()


@as_root
def test_another_user_reaches_neither_the_socket_nor_the_watchdog(
    listener: tuple[socket.socket, Path, str], watched: Callable[[int], Watchdog]
) -> None:
    _, folder, _ = listener
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert as_other_user(folder / channel.FILE) == "PermissionError"
    folder.chmod(0o755)
    (folder / channel.FILE).chmod(0o777)
    assert as_other_user(folder / channel.FILE) == "connected"
    watchdog = watched(os.getppid())
    watchdog.serve(lambda: False, 0.3)
    assert watchdog.ranks == []


@as_root
def test_a_folder_of_another_user_is_not_used(listener: tuple[socket.socket, Path, str]) -> None:
    _, folder, name = listener
    trap = folder.with_name(f"{name}.tmp-00000000")
    trap.mkdir(mode=0o700)
    os.chown(trap, NOT_US, NOT_US)
    try:
        line = channel.connect(name)
        assert line is not None and channel.peer_of(line)[0] == os.getpid()
        line.close()
        files.remove_run_folders(name)
        assert channel.connect(name) is None
    finally:
        trap.rmdir()


def test_a_process_of_another_torchrun_and_a_wrong_rank_are_refused(
    listener: tuple[socket.socket, Path, str], watched: Callable[[int], Watchdog]
) -> None:
    stranger = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    for number, launcher in ((0, stranger.pid), (7, os.getppid()), (-1, os.getppid())):
        line = channel.connect(listener[2])
        assert line is not None
        line.sendall(hello(number))
        watchdog = watched(launcher)
        watchdog.serve(partial(ended, line), 10)
        assert watchdog.ranks == []
        line.close()
    stranger.communicate()


LEAVER = """
import sys
from harness.tools.watchdog import channel
line = channel.connect(sys.argv[1])
line.send(b'{"say": "hello", "rank": 0, "handler": null}')
sys.stdin.read()
line.send(b'{"say": "bye", "code": 0}')
"""


def test_a_rank_that_said_goodbye_has_not_failed(
    listener: tuple[socket.socket, Path, str], watched: Callable[[int], Watchdog]
) -> None:
    watchdog = watched(os.getpid())
    rank = subprocess.Popen([sys.executable, "-c", LEAVER, listener[2]], stdin=subprocess.PIPE)
    watchdog.serve(lambda: bool(watchdog.ranks), 20)
    rank.communicate()
    exit_watch = watchdog.ranks[0].exit
    assert exit_watch and exit_watch.over.wait(10)
    watchdog.look()
    assert watchdog.ranks[0].gone and watchdog.own == []


def ended(line: socket.socket) -> bool:
    """Return whether the other end has closed the connection."""
    try:
        return line.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


GARBAGE = [
    b"garbage",
    b"[" * 100_000,
    b'{"say": "flush", "more": 1}',
    b'{"say":"moved"}',
    b"\xff\xfe",
    b'{"say": "flush"}',
    b'{"say": "hello", "rank": 7, "handler": null}',
]


def test_malformed_packets_of_others_do_not_disturb_a_rank(
    listener: tuple[socket.socket, Path, str], watched: Callable[[int], Watchdog]
) -> None:
    name, watchdog = listener[2], watched(os.getppid())
    rank = channel.connect(name)
    assert rank is not None
    rank.sendall(hello(0))
    watchdog.serve(lambda: bool(watchdog.ranks), 10)
    others = [other for _ in GARBAGE if (other := channel.connect(name))]
    for other, sent in zip(others, GARBAGE, strict=True):
        other.sendall(sent)
    rank.sendall(b"garbage")
    rank.sendall(
        b'{"say": "moved", "place": {"phase": "sync", "step": 1, "inside": true}, "begins": true, "due": null, "limit": 0}'
    )
    open_lines = list(others)

    def all_heard() -> bool:
        open_lines[:] = [each for each in open_lines if not ended(each)]
        return not open_lines and watchdog.ranks[0].place.inside

    watchdog.serve(all_heard, 10)
    assert all_heard() and watchdog.own == []
    assert [(each.rank, each.pid, str(each.place)) for each in watchdog.ranks] == [
        (0, os.getpid(), "in sync of step 1")
    ]
    for each in (rank, *others):
        each.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
)


@given(st.binary() | JSON.map(lambda each: json.dumps(each).encode()))
def test_any_packet_is_a_message_or_malformed(line: bytes) -> None:
    with suppress(MalformedError):
        assert isinstance(parse(line), Message)


PLACE = Place(7, "sync", 1, True)
KEY = bytes(range(32))


@pytest.fixture
def doors() -> Iterator[list[socket.socket]]:
    made = [open_heartbeat_socket(), open_heartbeat_socket()]
    yield made
    for door in made:
        door.close()


def pair(doors: list[socket.socket], clocks: list[Callable[[], float]], lost_seconds: float = 5) -> list[Heartbeats]:
    nodes = tuple(
        Node(host=f"host{index}", ranks=(index,), address=("127.0.0.1", "::1")[index], port=door.getsockname()[1])
        for index, door in enumerate(doors)
    )
    return [
        Heartbeats(door, Met(nodes, own, KEY.hex(), "", ""), lost_seconds, clock)
        for own, (door, clock) in enumerate(zip(doors, clocks, strict=True))
    ]


def exchange(speaker: Heartbeats, hearer: Heartbeats, *failures: Failure, left: bool = False) -> None:
    speaker.beat({speaker.met.own: PLACE}, failures, left)
    wait_for_datagram(hearer.socket)
    hearer.listen()


def wait_for_datagram(door: socket.socket) -> None:
    assert select.select([door], [], [], 10)[0]


def test_a_beat_tells_where_ranks_are_and_what_failed_over_ipv4_and_ipv6(doors: list[socket.socket]) -> None:
    ahead = 137.0  # clocks of hosts may differ
    first, second = pair(doors, [time.time, lambda: time.time() + ahead])
    assert [str(node) for node in first.silent()] == ["host1 (rank 1)"]
    happened = time.time()
    exchange(first, second)
    exchange(second, first, Failure(kind="died", time=happened + ahead, host="host1", ranks=(1,)))
    assert first.peers[1].places == {1: PLACE}
    assert second.peers[0].places == {0: PLACE}
    assert first.silent() == []
    assert first.peers[1].failures[0].time == pytest.approx(happened, abs=0.05)


def test_only_a_host_that_was_heard_can_be_lost_once_and_not_after_its_farewell(doors: list[socket.socket]) -> None:
    now = [100.0, 100.0]
    first, second = pair(doors, [lambda: now[0], lambda: now[1]])
    now[0] = 200
    assert first.newly_lost() == []
    exchange(second, first)
    now[0] += 4.9
    assert first.newly_lost() == []
    assert not first.all_heard_since(200.5)
    now[0] += 0.2
    assert [peer.node.host for peer in first.newly_lost()] == ["host1"]
    assert first.newly_lost() == []
    assert first.all_heard_since(200.5)
    first, second = pair(doors, [lambda: now[0], time.time])
    exchange(second, first, left=True)
    now[0] += 60
    assert first.newly_lost() == []


def send(door: socket.socket, data: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(data, ("127.0.0.1", door.getsockname()[1]))
    wait_for_datagram(door)


def signed(beat: object, key: bytes = KEY) -> bytes:
    said = json.dumps(beat).encode()
    return hmac.digest(key, said, "sha256") + said


BEAT = {"node": 1, "to": 0, "count": 1, "places": {}, "failures": [], "left": True}
NO_BEATS = {
    "garbage": b"[" * 50_000,
    "unsigned": json.dumps(BEAT).encode(),
    "another key": signed(BEAT, b"guessed"),
    "to another host": signed(BEAT | {"to": 1}),
    "no beat": signed([]),
}


def test_a_datagram_that_is_no_new_beat_of_this_run_is_ignored(doors: list[socket.socket]) -> None:
    now = [100.0]
    first, second = pair(doors, [lambda: now[0], time.time])
    for name, data in NO_BEATS.items():
        send(doors[0], data)
        first.listen()
        assert not first.peers[1].left, name
    second.beat({1: PLACE}, [])
    wait_for_datagram(doors[0])
    recorded = doors[0].recv(60_000)
    send(doors[0], recorded)
    first.listen()
    assert first.peers[1].places == {1: PLACE} and first.peers[1].heard == 100.0
    now[0] = 106.0
    send(doors[0], recorded)
    first.listen()
    assert [peer.node.host for peer in first.newly_lost()] == ["host1"]
