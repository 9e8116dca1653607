"""Who is heard by a watchdog: processes of its user and of its torchrun, whatever they say; another user is not."""

import json
import os
import selectors
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.tools.watchdog import private_socket
from harness.tools.watchdog.launcher import Launcher
from harness.tools.watchdog.local_rank import LocalRank
from harness.tools.watchdog.messages import LONGEST_LINE, Lines, MalformedError, parse
from harness.tools.watchdog.rank_listener import RankListener
from harness.tools.watchdog.watchdog import Watchdog

NOT_US = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
# What another user tries: to reach the socket by its path, or one of their own in its place.
INTRUDER = """
import os, socket, sys
os.setgid({user}); os.setuid({user})
try:
    line = socket.socket(socket.AF_UNIX)
    line.connect(sys.argv[1])
    line.sendall(b'{{"say": "hello", "rank": 0, "handler": null}}\\n')
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture
def listener() -> Iterator[tuple[socket.socket, Path, str]]:
    name = f"harness-test-{os.getpid()}-{time.monotonic_ns()}"
    made, folder = private_socket.listen(name)
    yield made, folder, name
    made.close()
    private_socket.remove(folder)


def as_other_user(path: Path) -> str:
    code = INTRUDER.format(user=NOT_US)
    return subprocess.run([sys.executable, "-S", "-c", code, str(path)], capture_output=True, text=True).stdout.strip()


def admitted(made: socket.socket, folder: Path, launcher: int, number: int = 0) -> Callable[[], LocalRank]:
    """What the watchdog does with the one that has connected."""
    ranks = RankListener(made, folder, Launcher(psutil.Process(launcher), True), 2, 2)
    (rank,) = ranks.accept()

    def admit() -> LocalRank:
        ranks.admit(rank, number, None)
        return rank

    return admit


@as_root
def test_another_user_does_not_reach_the_socket(listener: tuple[socket.socket, Path, str]) -> None:
    _, folder, _ = listener
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert as_other_user(folder / private_socket.FILE) == "PermissionError"


@as_root
def test_another_user_who_reaches_it_all_the_same_is_not_heard(listener: tuple[socket.socket, Path, str]) -> None:
    made, folder, _ = listener
    folder.chmod(0o755)
    (folder / private_socket.FILE).chmod(0o777)
    assert as_other_user(folder / private_socket.FILE) == "connected"
    ranks = RankListener(made, folder, Launcher(psutil.Process(), True), 2, 2)
    assert ranks.accept() == []


@as_root
def test_a_folder_of_another_user_under_our_name_is_not_taken(listener: tuple[socket.socket, Path, str]) -> None:
    _, folder, name = listener
    trap = folder.with_name(f"{name}-00000000")
    trap.mkdir(mode=0o700)
    os.chown(trap, NOT_US, NOT_US)
    try:
        line = private_socket.connect(name)
        assert line is not None and private_socket.peer_of(line).pid == os.getpid()
        line.close()
        private_socket.remove(folder)
        assert private_socket.connect(name) is None
    finally:
        trap.rmdir()


def test_a_rank_is_known_by_the_kernels_word(listener: tuple[socket.socket, Path, str]) -> None:
    made, folder, name = listener
    line = private_socket.connect(name)
    rank = admitted(made, folder, os.getppid())()
    assert (rank.rank, rank.pid) == (0, os.getpid())
    assert line is not None and json.loads(line.recv(1000)) == {"watchdogs": [os.getpid(), os.getppid()]}
    line.close()


def test_no_process_of_another_torchrun_and_no_rank_that_is_none(listener: tuple[socket.socket, Path, str]) -> None:
    made, folder, name = listener
    stranger = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    for number, launcher in ((0, stranger.pid), (7, os.getppid()), (-1, os.getppid())):
        line = private_socket.connect(name)
        with pytest.raises(MalformedError):
            admitted(made, folder, launcher, number)()
        assert line is not None
        line.close()
    stranger.communicate()


GARBAGE = [
    b"garbage",
    b"[1]",
    b'{"say":"begins"}',
    b"\xff\xfe",
    b'{"say": "flush"}',
    b'{"say": "hello", "rank": 7, "handler": null}',
]


def test_what_is_malformed_costs_its_own_line_alone(listener: tuple[socket.socket, Path, str]) -> None:
    made, folder, name = listener
    torchrun = Launcher(psutil.Process(os.getppid()), is_torchrun=False)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    watchdog = Watchdog(
        **{"listener": RankListener(made, folder, torchrun, 2, 2), "standby": ours, "hosts_door": None},
        **{"launcher": torchrun, "name": name, "host": "host0", "idle_seconds": 600.0, "heartbeat_timeout": 10.0},
    )
    watchdog._selector.register(made, selectors.EVENT_READ)
    rank = private_socket.connect(name)
    assert rank is not None
    rank.sendall(b'{"say": "hello", "rank": 0, "handler": null}\n')
    others = [private_socket.connect(name) for _ in GARBAGE]
    for other, said in zip(others, GARBAGE, strict=True):
        assert other is not None
        other.sendall(said + b"\n")
    rank.sendall(b"garbage\n" + b'{"say": "begins", "phase": "sync", "step": 1, "deadline": null}\n')
    watchdog.serve(lambda: False, 0.5)
    assert [other.recv(1) for other in others if other] == [b""] * len(GARBAGE)
    assert [(each.rank, each.where) for each in watchdog.ranks] == [(0, "sync of step 1")] and watchdog.own == []
    assert b"watchdogs" in rank.recv(1000)
    for each in (rank, *filter(None, others), ours, theirs):
        each.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
)
SAYS = ("hello", "begins", "ends", "injected", "interrupted", "failed", "bye", "flush", "peers", "nothing")
NAMES = (
    "rank",
    "handler",
    "phase",
    "step",
    "deadline",
    "fault",
    "error",
    "echo",
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
def test_whatever_comes_is_a_message_or_malformed(line: bytes) -> None:
    try:
        message = parse(line)
    except MalformedError:
        return
    assert message["say"] in SAYS


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b'{"say": ["hello"]}', b'{"say": "hello", "rank": true, "handler": null}']
)
def test_these_are_malformed(line: bytes) -> None:
    with pytest.raises(MalformedError):
        parse(line)


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_lines_come_whole_however_they_are_cut(pieces: list[bytes]) -> None:
    lines = Lines()
    found = [line for piece in pieces for line in lines.add(piece)]
    assert found == b"".join(pieces).split(b"\n")[:-1]


def test_a_line_without_an_end_is_given_up() -> None:
    lines = Lines()
    pieces = [bytes(1 << 20)] * (LONGEST_LINE // (1 << 20) + 1)
    assert [line for piece in pieces for line in lines.add(piece)] == [b""]
    assert lines.add(b"next\n") == [b"next"]
    assert lines.add(bytes(LONGEST_LINE + 1) + b"\nnext\n") == [b"", b"next"]
