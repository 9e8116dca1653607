"""A rank's line to the watchdog of its host: what it says there, and the order to leave that it obeys."""

import json
import os
import secrets
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

from harness.failures.failure import SHOWN, is_echo, shortened
from harness.failures.heartbeat import open_for_beats
from harness.failures.processes import MARK, launcher, say, started_at
from harness.failures.stacks import offer_own_stack
from harness.rollout.processes import children, end

JOIN_SECONDS = 60.0
"""How long a rank looks for the watchdog that the first rank of its host starts."""
ORDER_SECONDS = 15.0
"""Beyond lost_host_seconds: how long a rank that failed waits for the order to leave."""
FAILED = 1
_ROOT = Path(__file__).resolve().parents[2]


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
    secret: str
    address: str = ""
    """Of this host, as the other hosts reach it."""


@dataclass(slots=True)
class Guard:
    """What the watchdog is told. Every call is cheap, may come from any thread, and does nothing where there is none."""

    post: Post
    deadline: Callable[[str], float | None]
    """Seconds that a phase may take; None: no limit."""
    lost_host_seconds: float
    on_leave: list[Callable[[], None]] = field(default_factory=list)
    """Called before this process leaves by order: what must be flushed."""
    on_deadline: list[Callable[[Path], None]] = field(default_factory=list)
    """Called with the run's folder, on a thread, when a deadline has passed somewhere: what only this process can tell."""
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
        lost_host_seconds: float,
    ) -> "Guard":
        """The first rank of a torchrun starts its watchdog; all ranks of it meet there.

        host: name for people. idle_seconds: how long a rank may be between two phases.
        """
        parent = launcher()
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        # In Linux's abstract namespace: no file that could be left, and each network namespace has its own names.
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
                "lost_host_seconds": lost_host_seconds,
            }
            port = _start_watchdog(name, settings, other_hosts=world_size > local_world_size)
        os.environ[MARK] = name  # not in our own block of /proc, only in those of the processes that we start
        post = Post(rank=rank, host=host, watchdog=name, port=port, secret=secrets.token_hex(8))
        guard = cls(post, deadline, lost_host_seconds)
        guard._line = _join(name)
        if guard._line is None:
            say(f"rank {rank}: no watchdog on {host}; deadlines and lost hosts will not be noticed\n")
            return guard
        guard._tell(say="hello", rank=rank, pid=os.getpid(), handler=offer_own_stack())
        threading.Thread(target=guard._obey, name="guard", daemon=True).start()
        return guard

    def begins(self, phase: str, step: int | None = None) -> None:
        """A phase begins; an observer for EventLog."""
        self._tell(say="begins", phase=phase, step=step, deadline=self.deadline(phase))

    def ends(self, phase: str, step: int | None = None) -> None:
        """A phase ended well; an observer for EventLog."""
        self._tell(say="ends", phase=phase)

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
        self._tell(say="peers", nodes=nodes, own=own, run=posts[0].secret, folder=str(folder))
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
        time.sleep(self.lost_host_seconds + ORDER_SECONDS)

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
        code = self._order()
        if self._done:
            return
        if code is None:
            # Nobody is left who would notice that this run hangs, and the other hosts hear nothing of this one.
            say(f"rank {self.post.rank} FAILED: the watchdog of {self.post.host} is gone, so this rank ends too\n")
            end(children(), patience_seconds=0)
        for flush in self.on_leave:
            with suppress(OSError):  # a full disk, which is why it leaves
                flush()
        os._exit(FAILED if code is None else code)

    def _order(self) -> int | None:
        """The exit code to leave with, once it is said; None where the watchdog has gone."""
        assert self._line is not None
        with suppress(OSError), self._line.makefile(encoding="utf-8") as lines:
            for line in lines:
                message = json.loads(line)
                if "leave" in message:
                    return int(message["leave"])
                if "dump" in message:
                    for dump in self.on_deadline:
                        dump(Path(message["dump"]))
                else:
                    self._answered.set()
        return None


def _start_watchdog(name: str, settings: dict[str, Any], other_hosts: bool) -> int:
    """Start it as nobody's child, with the sockets that it hears ranks and hosts with; returns the port of the latter, or 0."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as ranks:
        ranks.bind(f"\0{name}")
        ranks.listen(64)
        passed, port, hosts = [ranks.fileno()], 0, None
        if other_hosts:
            hosts = open_for_beats()
            port = int(hosts.getsockname()[1])
            passed.append(hosts.fileno())
        module = [sys.executable, "-m", "harness.failures.watchdog_process", json.dumps(settings | {"sockets": passed})]
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        subprocess.run(
            module,
            env=os.environ | {"PYTHONPATH": path},
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
        )
        if hosts is not None:
            hosts.close()
        return port


def _join(name: str) -> socket.socket | None:
    """A line to the watchdog of this name; None where there is none, even after a while."""
    given_up = time.monotonic() + JOIN_SECONDS
    while time.monotonic() < given_up:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            line.connect(f"\0{name}")
        except OSError:
            line.close()
            time.sleep(0.05)
            continue
        return line
    return None
