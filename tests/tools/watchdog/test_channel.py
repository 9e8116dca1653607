"""Which processes a watchdog hears: those of its user and of its torchrun, whatever they send; no other user's."""

import json
import os
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

from harness.tools.watchdog import channel
from harness.tools.watchdog.channel import MalformedError, Message, Met, WatchdogSettings, parse
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
    made, folder = channel.listen(name)
    yield made, folder, name
    made.close()
    channel.remove(folder)


def as_other_user(path: Path) -> str:
    code = INTRUDER.format(user=NOT_US)
    return subprocess.run([sys.executable, "-S", "-c", code, str(path)], capture_output=True, text=True).stdout.strip()


@pytest.fixture
def watched(listener: tuple[socket.socket, Path, str]) -> Callable[[int], Watchdog]:
    """Return a watchdog of two ranks that this process, or another one, has started; it hears when it serves."""
    made, folder, name = listener
    settings = WatchdogSettings(
        host="host0",
        world_size=2,
        local_world_size=2,
        idle_seconds=600.0,
        heartbeat_timeout=10.0,
        stopped_seconds=60.0,
        name=name,
    )

    def make(launcher: int) -> Watchdog:
        return Watchdog(settings, psutil.Process(launcher), made, folder, None)

    return make


def hello(rank: int) -> bytes:
    return json.dumps({"say": "hello", "rank": rank, "handler": None}).encode()


@as_root
def test_the_socket_is_closed_to_other_users(listener: tuple[socket.socket, Path, str]) -> None:
    _, folder, _ = listener
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert as_other_user(folder / channel.FILE) == "PermissionError"


@as_root
def test_a_connection_of_another_user_is_closed(
    listener: tuple[socket.socket, Path, str], watched: Callable[[int], Watchdog]
) -> None:
    _, folder, _ = listener
    folder.chmod(0o755)
    (folder / channel.FILE).chmod(0o777)
    assert as_other_user(folder / channel.FILE) == "connected"
    watchdog = watched(os.getppid())
    watchdog.serve(lambda: False, 0.3)
    assert watchdog.ranks == []


@as_root
def test_a_folder_of_another_user_is_not_used(listener: tuple[socket.socket, Path, str]) -> None:
    _, folder, name = listener
    trap = folder.with_name(f"{name}-00000000")
    trap.mkdir(mode=0o700)
    os.chown(trap, NOT_US, NOT_US)
    try:
        line = channel.connect(name)
        assert line is not None and channel.peer_of(line)[0] == os.getpid()
        line.close()
        channel.remove(folder)
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
    b"[1]",
    b'{"say":"begins"}',
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
    rank.sendall(b'{"say": "begins", "phase": "sync", "step": 1, "deadline": null}')
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


def peers(port: int = 1, own: int = 0, key: str = "00") -> bytes:
    nodes = [{"host": "host0", "ranks": [0], "address": "", "port": port}]
    return json.dumps({"say": "peers", "nodes": nodes, "own": own, "key": key, "folder": "runs/a"}).encode()


SAYS = ("hello", "begins", "ends", "failed", "bye", "flush", "peers", "nothing")
NAMES = (
    "rank",
    "handler",
    "phase",
    "step",
    "deadline",
    "error",
    "kind",
    "trace",
    "code",
    "nodes",
    "own",
    "key",
)
MESSAGES = st.builds(
    lambda say, rest: {"say": say} | rest, st.sampled_from(SAYS), st.dictionaries(st.sampled_from(NAMES), JSON)
)


@given(st.binary() | JSON.map(lambda each: json.dumps(each).encode()) | MESSAGES.map(lambda m: json.dumps(m).encode()))
def test_any_packet_is_a_message_or_malformed(line: bytes) -> None:
    with suppress(MalformedError):
        assert isinstance(parse(line), Message)


@pytest.mark.parametrize(
    "line",
    [
        *(b"[" * 100_000, b'{"say": ["hello"]}', b'{"say": "hello", "rank": true, "handler": null}'),
        *(b'{"say": "flush", "more": 1}', peers(port=1 << 16), peers(own=1), peers(key="no key")),
    ],
    ids=range(7),
)
def test_malformed_packets(line: bytes) -> None:
    with pytest.raises(MalformedError):
        parse(line)


def test_the_message_that_all_ranks_have_met() -> None:
    message = parse(peers())
    assert isinstance(message, Met) and message.nodes[0].host == "host0"
