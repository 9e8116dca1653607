"""Beats over real UDP sockets on loopback, with clocks of our own."""

import hmac
import json
import select
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from harness.tools.watchdog.failures import Node, Place, RunFailure
from harness.tools.watchdog.heartbeat import Heartbeats, open_heartbeat_socket

PLACE = Place(7, "sync", 1, True)
KEY = bytes(range(32))


@pytest.fixture
def doors() -> Iterator[list[socket.socket]]:
    made = [open_heartbeat_socket(), open_heartbeat_socket()]
    yield made
    for door in made:
        door.close()


def pair(doors: list[socket.socket], clocks: list[Callable[[], float]], lost_seconds: float = 5) -> list[Heartbeats]:
    nodes = [
        Node(host=f"host{index}", ranks=(index,), address=("127.0.0.1", "::1")[index], port=door.getsockname()[1])
        for index, door in enumerate(doors)
    ]
    return [
        Heartbeats(socket=door, nodes=nodes, own=own, key=KEY, lost_seconds=lost_seconds, now=clock)
        for own, (door, clock) in enumerate(zip(doors, clocks, strict=True))
    ]


def exchange(
    speaker: Heartbeats, hearer: Heartbeats, failures: list[RunFailure] | None = None, left: bool = False
) -> None:
    speaker.beat({speaker.own: PLACE}, failures or [], left)
    wait_for_datagram(hearer.socket)
    hearer.listen()


def wait_for_datagram(door: socket.socket) -> None:
    assert select.select([door], [], [], 10)[0]


def test_a_beat_tells_where_ranks_are_over_ipv4_and_ipv6(doors: list[socket.socket]) -> None:
    first, second = pair(doors, [time.time, time.time])
    assert [str(node) for node in first.silent()] == ["host1 (rank 1)"]
    exchange(first, second)
    exchange(second, first)
    assert first.peers[1].places == {1: PLACE}
    assert second.peers[0].places == {0: PLACE}
    assert first.silent() == []


def test_clocks_of_hosts_may_differ(doors: list[socket.socket]) -> None:
    ahead = 137.0
    first, second = pair(doors, [time.time, lambda: time.time() + ahead])
    happened = time.time()
    failure = RunFailure(kind="died", time=happened + ahead, host="host1", ranks=(1,), place=PLACE)
    exchange(second, first, [failure])
    assert first.peers[1].failures[0].time == pytest.approx(happened, abs=0.05)
    assert first.peers[1].failures[0].place == PLACE


def test_only_a_host_that_was_heard_can_be_lost_and_only_once(doors: list[socket.socket]) -> None:
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


def test_a_host_that_announced_its_exit_is_not_lost(doors: list[socket.socket]) -> None:
    now = [100.0]
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


BEAT = {
    **{"node": 1, "to": 0, "count": 1, "places": {}, "failures": []},
    **{"left": True},
}


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xff\xfe", b"[" * 50_000, json.dumps(BEAT).encode(), signed(BEAT, b"guessed")),
        *(signed(BEAT)[:-1], signed(BEAT | {"to": 1}), signed(BEAT | {"node": 0}), signed(BEAT | {"node": []})),
        *(signed([]), signed(7), signed({}), signed(BEAT | {"places": []}), signed(BEAT | {"count": float("inf")})),
    ],
    ids=range(14),
)
def test_a_datagram_that_is_not_a_beat_of_this_run_is_ignored(doors: list[socket.socket], data: bytes) -> None:
    first, second = pair(doors, [time.time, time.time])
    send(doors[0], data)
    first.listen()
    assert not first.peers[1].left
    exchange(second, first)
    exchange(second, first)
    assert first.peers[1].places == {1: PLACE}


def test_a_repeated_beat_is_ignored(doors: list[socket.socket]) -> None:
    now = [100.0]
    first, second = pair(doors, [lambda: now[0], time.time])
    second.beat({1: PLACE}, [])
    wait_for_datagram(doors[0])
    recorded = doors[0].recv(60_000)
    send(doors[0], recorded)
    first.listen()
    assert first.peers[1].heard == 100.0
    now[0] = 106.0
    send(doors[0], recorded)
    first.listen()
    assert [peer.node.host for peer in first.newly_lost()] == ["host1"]
