"""A rank's line to the watchdog of its host: what it says there, and the order to leave that it obeys."""

import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from harness.runtime.errors import say
from harness.runtime.processes import descendants, end_processes, is_alive, is_stopped, started_at
from harness.tools.watchdog import private_socket
from harness.tools.watchdog.failure import SHOWN, is_echo, shortened
from harness.tools.watchdog.heartbeat import BEAT_SECONDS, open_for_beats
from harness.tools.watchdog.lost_watchdog import keep_failure
from harness.tools.watchdog.processes import MARK, launcher
from harness.tools.watchdog.silence import Silence
from harness.tools.watchdog.stacks import offer_own_stack

JOIN_SECONDS = 60.0
"""How long a rank looks for the watchdog that the first rank of its host starts."""
ORDER_SECONDS = 15.0
"""Beyond heartbeat_timeout: how long a rank that failed waits for the order to leave."""
STOPPED_BEATS, SILENT_BEATS = 10, 90
"""How many beats a watchdog that is stopped, and one that is not, may miss before its ranks end: more than its standby
waits."""
KEPT_SECONDS = 2.0
GONE = "is gone"
FAILED = 1
_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, kw_only=True, slots=True)
class Post:
    """Where one rank is, and the watchdog beside it; picklable, to be gathered from all ranks."""

    rank: int
    host: str
    """Name for people."""
    watchdog: str
    """The same for all ranks of one watchdog."""
    port: int
    """0 where other hosts are not listened to; known to the first rank of each host."""
    secret: str = field(repr=False)
    """Of the first rank it is the key of the run's heartbeats."""
    address: str = ""
    """Of this host, as the other hosts reach it."""


@dataclass(slots=True)
class Guard:
    """What the watchdog is told. Every call is cheap, may come from any thread, and does nothing where there is none."""

    post: Post
    deadline: Callable[[str], float | None]
    """Seconds that a phase may take; None: no limit."""
    heartbeat_timeout: float
    on_leave: list[Callable[[], None]] = field(default_factory=list)
    """Called before this process leaves by order: what must be flushed."""
    on_deadline: list[Callable[[Path], None]] = field(default_factory=list)
    """Called with the run's folder, on a thread, when a deadline has passed somewhere: what only this process can tell."""
    folder: Path | None = None
    """The run's, once all ranks have met."""
    _place: tuple[str, int | None] = ("", None)
    """The phase and step that began last."""
    _watchdogs: list[psutil.Process] = field(default_factory=list)
    """The watchdog and its standby."""
    _line: socket.socket | None = None
    _done: bool = False
    _answered: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(
        cls,
        *,
        rank: int,
        world_size: int,
        local_rank: int,
        local_world_size: int,
        host: str,
        deadline: Callable[[str], float | None],
        idle_seconds: float,
        heartbeat_timeout: float,
    ) -> "Guard":
        """The first rank of a torchrun starts its watchdog; all ranks of it meet there.

        host: name for people. idle_seconds: how long a rank may be between two phases.
        """
        parent = launcher()
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        name = f"harness-{os.getuid()}-{parent.pid}-{started_at(parent.pid)}-{restart}"
        port = 0
        if local_rank == 0:
            settings = {
                "launcher": parent.pid,
                "is_torchrun": "TORCHELASTIC_RUN_ID" in os.environ,
                "name": name,
                "host": host,
                "world_size": world_size,
                "local_world_size": local_world_size,
                "idle_seconds": idle_seconds,
                "heartbeat_timeout": heartbeat_timeout,
            }
            port = _start_watchdog(name, settings, other_hosts=world_size > local_world_size)
        os.environ[MARK] = name  # not in our own block of /proc, only in those of the processes that we start
        post = Post(rank=rank, host=host, watchdog=name, port=port, secret=secrets.token_hex(32))
        guard = cls(post, deadline, heartbeat_timeout)
        guard._line = _join(name)
        if guard._line is None:
            say(f"rank {rank}: no watchdog on {host}; deadlines and lost hosts will not be noticed\n")
            return guard
        guard._tell(say="hello", rank=rank, handler=offer_own_stack())
        threading.Thread(target=guard._obey, name="guard", daemon=True).start()
        return guard

    def begins(self, phase: str, step: int | None = None) -> None:
        """A phase begins; an observer for EventLog."""
        self._place = (phase, step)
        self._tell(say="begins", phase=phase, step=step, deadline=self.deadline(phase))

    def ends(self, phase: str, step: int | None = None) -> None:
        """A phase ended well; an observer for EventLog."""
        self._tell(say="ends", phase=phase)

    def injected(self, fault: str) -> None:
        """A fault that was asked for happens to this rank in the phase that it is in."""
        self._tell(say="injected", fault=fault)

    def interrupted(self, signal_name: str) -> None:
        """This rank ends, because it got this signal."""
        self._tell(say="interrupted", signal=signal_name)

    def post_at(self, address: str) -> Post:
        """This rank's post, at this host's address for the other hosts; to be gathered from all ranks."""
        return replace(self.post, address=address)

    def meet(self, posts: Sequence[Post], folder: Path) -> None:
        """All ranks have met: from now on the hosts listen to each other. folder: where the watchdog leaves its verdict."""
        by_watchdog: dict[tuple[str, str], list[Post]] = {}
        for post in posts:
            by_watchdog.setdefault((post.host, post.watchdog), []).append(post)
        nodes = [
            {
                "host": together[0].host,
                "ranks": [post.rank for post in together],
                "address": together[0].address,
                "port": max(post.port for post in together),
            }
            for together in by_watchdog.values()
        ]
        own = list(by_watchdog).index((self.post.host, self.post.watchdog))
        self.folder = folder
        self._tell(say="peers", nodes=nodes, own=own, key=posts[0].secret, folder=str(folder))
        self._wait_for_answer()

    def flush(self, *_: Any) -> None:
        """Return once the other hosts have been told where this rank is; an observer for EventLog too."""
        self._answered.clear()
        self._tell(say="flush")
        self._wait_for_answer()

    def failed(self, error: str, traceback: str = "") -> None:
        """This rank is about to end, because of this. Waits for the watchdog's order, in which the process ends; returns
        where there is no watchdog, or no order in time."""
        if self._done or self._line is None:
            return
        line = " ".join(error.split())
        trace = shortened(traceback)
        self._tell(say="failed", error=line[:SHOWN], echo=is_echo(line, self.post.rank), trace=trace)
        time.sleep(self.heartbeat_timeout + ORDER_SECONDS)

    def bye(self, code: int) -> None:
        """This rank leaves by itself, with this exit code."""
        self._tell(say="bye", code=code)
        self._done = True

    def _wait_for_answer(self) -> None:
        if self._line is not None and not self._done:
            self._answered.wait(JOIN_SECONDS)

    def _tell(self, **message: Any) -> None:
        if self._line is None or self._done:
            return
        data = (json.dumps(message) + "\n").encode()
        try:
            with self._lock:
                self._line.sendall(data)
        except OSError:
            return  # the watchdog has gone, and _obey is about to see it

    def _obey(self) -> None:
        """On a thread of its own: the main one may sit in a collective for ever."""
        code, wrong = self._order()
        if self._done:
            return
        if code is None:
            # Nothing is left that would notice that this run hangs, and the other hosts hear nothing of this one.
            say(f"rank {self.post.rank} FAILED: the watchdog of {self.post.host} {wrong}, so this rank ends too\n")
            end_processes(descendants(), patience_seconds=0)
            self._end_watchdogs(wrong)
        for flush in self.on_leave:
            with suppress(OSError):  # a full disk, which is why it leaves
                flush()
        os._exit(FAILED if code is None else code)

    def _order(self) -> tuple[int | None, str]:
        """The exit code to leave with, once it is said; None, and why, where there is no watchdog any more."""
        assert self._line is not None
        silence, data = Silence(0, STOPPED_BEATS, SILENT_BEATS), b""
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        with suppress(OSError):
            while True:
                if not poll.poll(BEAT_SECONDS * 1000):
                    silence.pid = self._watchdogs[0].pid if self._watchdogs else 0
                    if wrong := silence.miss():
                        return None, wrong
                    continue
                if not (more := self._line.recv(1 << 16)):
                    break
                silence.heard()
                *lines, data = (data + more).split(b"\n")
                for line in lines:
                    if (code := self._take(json.loads(line))) is not None:
                        return code, ""
        return None, GONE

    def _take(self, message: dict[str, Any]) -> int | None:
        """Do what the watchdog says; returns the exit code where that is to leave."""
        if "leave" in message:
            return int(message["leave"])
        if "watchdogs" in message:
            with suppress(psutil.NoSuchProcess):  # it has just ended, as will be seen
                self._watchdogs = [psutil.Process(pid) for pid in message["watchdogs"]]
        elif "dump" in message:
            for dump in self.on_deadline:
                dump(Path(message["dump"]))
        elif "done" in message:
            self._answered.set()
        return None

    def _end_watchdogs(self, wrong: str) -> None:
        """Leave all else to the standby; where that does nothing either, end both, and keep why."""
        if wrong == GONE and any(is_alive(each) and not is_stopped(each.pid) for each in self._watchdogs[1:]):
            return
        for each in self._watchdogs:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        if self.folder and self._watchdogs:
            detail = f"(pid {self._watchdogs[0].pid}) {wrong}"
            keep_failure(self.folder, self.post.host, self.post.rank, detail, self._place, KEPT_SECONDS)


def _start_watchdog(name: str, settings: dict[str, Any], other_hosts: bool) -> int:
    """Start its standby, which starts it, with the sockets that it hears ranks and hosts with; returns the port of the
    latter, or 0."""
    listener, folder = private_socket.listen(name)
    passed, port, hosts = [listener.fileno()], 0, None
    if other_hosts:
        hosts = open_for_beats()
        port = int(hosts.getsockname()[1])
        passed.append(hosts.fileno())
    settings = settings | {"sockets": passed, "socket_folder": str(folder)}
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(
        [sys.executable, "-m", "harness.tools.watchdog.standby", json.dumps(settings)],
        env=os.environ | {"PYTHONPATH": path},
        pass_fds=passed,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        check=True,
    )
    listener.close()
    if hosts is not None:
        hosts.close()
    return port


def _join(name: str) -> socket.socket | None:
    """A line to the watchdog of this name; None where there is none, even after a while."""
    given_up = time.monotonic() + JOIN_SECONDS
    while time.monotonic() < given_up:
        if (line := private_socket.connect(name)) is not None:
            return line
        time.sleep(0.05)
    return None
