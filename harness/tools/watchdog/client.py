"""A rank's connection to the watchdog of its host: what the rank reports, and the order to exit that it obeys."""

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
from typing import Any, TypedDict

import msgspec
import psutil

from harness.runtime.errors import say
from harness.runtime.observer import Observer
from harness.runtime.processes import descendants, end_processes, is_alive, is_stopped, started_at
from harness.tools.watchdog import channel
from harness.tools.watchdog.failures import ERROR_LENGTH, Node, Place, RunFailure, is_echo, trace_end
from harness.tools.watchdog.heartbeat import BEAT_SECONDS, open_heartbeat_socket
from harness.tools.watchdog.host_processes import MARK, SilenceCounter, find_launcher
from harness.tools.watchdog.stacks import offer_own_stack

JOIN_SECONDS = 60.0  # a rank looks for so long for the watchdog that the first rank of its host starts
ORDER_SECONDS = 15.0  # beyond heartbeat_timeout: a rank that failed waits for so long for the order to exit
# How many beats a watchdog that is stopped, and any other, may miss before its ranks end: more than its standby waits.
STOPPED_BEATS, SILENT_BEATS = 10, 90
KEEP_SECONDS = 2.0
GONE = "is gone"
FAILED = 1
_ROOT = Path(__file__).resolve().parents[3]


class WatchdogSettings(TypedDict):
    """What a watchdog must know of the run."""

    host: str  # name for people
    world_size: int
    local_world_size: int
    idle_seconds: float  # a rank may be so long between two phases
    heartbeat_timeout: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchdogAddress:
    """The watchdog of one rank, as the rank knows it; picklable, to be gathered from all ranks."""

    rank: int
    host: str  # name for people
    watchdog: str  # the same for all ranks of one watchdog
    port: int  # for heartbeats; known to the first rank of each host, and 0 on one host
    secret: str = field(repr=False)  # that of the first rank is the key of the run's heartbeats
    address: str = ""  # of this host, as the other hosts reach it


class WatchdogClient(Observer):
    """Reports a rank's phases and failures. Calls are cheap, thread-safe, and do nothing if there is no watchdog."""

    def __init__(self) -> None:
        self.own: WatchdogAddress
        self.folder: Path | None = None  # the run directory, once all ranks have met
        self.on_exit: list[Callable[[], None]] = []  # called before this process exits by order, to flush
        self.on_deadline: list[Callable[[Path], None]] = []
        """Called on a thread, with the run directory, when a deadline has passed on any rank, to write evidence there."""
        self._deadline: Callable[[str], float | None] = lambda phase: None
        self._heartbeat_timeout = 0.0
        self._place: tuple[str, int | None] = ("", None)  # the phase and step that began last
        self._watchdogs: list[psutil.Process] = []  # the watchdog and its standby
        self._line: socket.socket | None = None
        self._finished = False
        self._answered = threading.Event()
        self._lock = threading.Lock()

    def connect(
        self, rank: int, local_rank: int, deadline: Callable[[str], float | None], settings: WatchdogSettings
    ) -> None:
        """Connect to the watchdog; the first rank of a torchrun starts it.

        deadline: seconds that a phase may take, None for no limit. settings: the same for all ranks of a torchrun.
        """
        self._deadline, self._heartbeat_timeout = deadline, settings["heartbeat_timeout"]
        launcher, host = find_launcher(), settings["host"]
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        name = f"harness-{os.getuid()}-{launcher.pid}-{started_at(launcher.pid)}-{restart}"
        process = {"launcher": launcher.pid, "is_torchrun": "TORCHELASTIC_RUN_ID" in os.environ, "name": name}
        port = _start_watchdog({**settings, **process}) if local_rank == 0 else 0
        os.environ[MARK] = name  # in the environment of the processes that this one starts
        self.own = WatchdogAddress(rank=rank, host=host, watchdog=name, port=port, secret=secrets.token_hex(32))
        given_up = time.monotonic() + JOIN_SECONDS
        while (line := channel.connect(name)) is None:
            if time.monotonic() > given_up:
                say(f"rank {rank}: no watchdog on {host}; timeouts of phases and lost hosts will not be noticed\n")
                return
            time.sleep(0.05)
        self._line = line
        self._send(channel.Hello(rank, offer_own_stack()))
        threading.Thread(target=self._obey, name="watchdog-client", daemon=True).start()

    def phase_begins(self, phase: str, step: int | None = None) -> None:
        self._place = (phase, step)
        self._send(channel.PhaseBegins(phase, step, self._deadline(phase)))

    def phase_ends(self, phase: str, step: int | None = None) -> None:
        self._send(channel.PhaseEnds(phase))

    def injected(self, fault: str) -> None:
        """Report a fault that was asked for, before it happens to this rank in its present phase."""
        self._send(channel.Injected(fault))

    def interrupted(self, signal_name: str) -> None:
        self._send(channel.Interrupted(signal_name))

    def at(self, address: str) -> WatchdogAddress:
        """Return this rank's watchdog with this host's address, to be gathered from all ranks."""
        return replace(self.own, address=address)

    def meet(self, addresses: Sequence[WatchdogAddress], folder: Path) -> None:
        """Let the watchdogs listen to each other, and wait for their first beats. addresses: of all ranks.

        folder: the run directory, where the watchdog keeps its verdict.
        """
        by_watchdog: dict[tuple[str, str], list[WatchdogAddress]] = {}
        for each in addresses:
            by_watchdog.setdefault((each.host, each.watchdog), []).append(each)
        nodes = tuple(
            Node(
                host=together[0].host,
                ranks=tuple(each.rank for each in together),
                address=together[0].address,
                port=max(each.port for each in together),
            )
            for together in by_watchdog.values()
        )
        own = list(by_watchdog).index((self.own.host, self.own.watchdog))
        self.folder = folder
        self._send(channel.Met(nodes, own, addresses[0].secret, str(folder)))
        self._wait_for_answer()

    def flush(self) -> None:
        """Return once the watchdogs of the other hosts know this rank's phase."""
        self._answered.clear()
        self._send(channel.Flush())
        self._wait_for_answer()

    def failed(self, error: str, traceback: str = "") -> None:
        """Report the error that is about to end this rank, and wait for the order to exit.

        Return if there is no watchdog, or no order in time.
        """
        if self._finished or self._line is None:
            return
        line = " ".join(error.split())
        self._send(channel.Failed(line[:ERROR_LENGTH], is_echo(line, self.own.rank), trace_end(traceback)))
        time.sleep(self._heartbeat_timeout + ORDER_SECONDS)

    def finished(self, code: int) -> None:
        """Report that this rank is about to exit on its own, with this code."""
        self._send(channel.Exits(code))
        self._finished = True

    def _wait_for_answer(self) -> None:
        if self._line is not None and not self._finished:
            self._answered.wait(JOIN_SECONDS)

    def _send(self, message: channel.Message) -> None:
        if self._line is not None and not self._finished:
            # On an OSError the watchdog has gone, which _obey is about to see.
            with suppress(OSError), self._lock:
                self._line.sendall(msgspec.json.encode(message) + b"\n")

    def _obey(self) -> None:
        """Wait on a thread for the order to exit, as the main thread may be stuck in a collective."""
        code, wrong = self._order()
        if self._finished:
            return
        if code is None:
            # Without a watchdog nothing notices that this run hangs, and the other hosts hear nothing from this one.
            say(f"rank {self.own.rank} FAILED: the watchdog of {self.own.host} {wrong}, so this rank exits too\n")
            end_processes(descendants(), patience_seconds=0)
            self._end_watchdogs(wrong)
        for flush in self.on_exit:
            with suppress(OSError):  # a full disk, which may be the failure
                flush()
        os._exit(FAILED if code is None else code)

    def _order(self) -> tuple[int | None, str]:
        """Return the exit code that the watchdog orders; or None, and why, if there is no watchdog any more."""
        assert self._line is not None
        silence, data = SilenceCounter(0, STOPPED_BEATS, SILENT_BEATS), b""
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
                silence.missed = 0
                *lines, data = (data + more).split(b"\n")
                for message in map(json.loads, lines):
                    if "leave" in message:
                        return int(message["leave"]), ""
                    self._take(message)
        return None, GONE

    def _take(self, message: dict[str, Any]) -> None:
        if "watchdogs" in message:
            with suppress(psutil.NoSuchProcess):  # it has just ended, as will be seen
                self._watchdogs = [psutil.Process(pid) for pid in message["watchdogs"]]
        elif "dump" in message:
            for dump in self.on_deadline:
                dump(Path(message["dump"]))
        elif "done" in message:
            self._answered.set()

    def _end_watchdogs(self, wrong: str) -> None:
        """Leave the rest to the standby; if that does nothing either, end both, and keep the reason."""
        if wrong == GONE and any(is_alive(each) and not is_stopped(each.pid) for each in self._watchdogs[1:]):
            return
        for each in self._watchdogs:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        if self.folder and self._watchdogs:
            detail = f"(pid {self._watchdogs[0].pid}) {wrong}"
            thread = threading.Thread(target=self._keep_failure, args=[self.folder, detail], daemon=True)
            thread.start()
            thread.join(KEEP_SECONDS)  # the folder may not answer

    def _keep_failure(self, folder: Path, detail: str) -> None:
        """Write the failure file of this host, unless another rank has."""
        from harness.tools.watchdog.verdict import JobView, RunVerdict  # a rank that ends well needs none of it

        rank, host, now = self.own.rank, self.own.host, time.time()
        if not (folder / f"failure-{host}.json").exists():
            place = Place(0, *self._place, inside=True)
            failure = RunFailure(kind="watchdog", time=now, host=host, ranks=(rank,), place=place, detail=detail)
            view = JobView(now=now, world_size=0, places={rank: place}, hosts={rank: host})
            RunVerdict(host, folder, [failure], view).keep()


def _start_watchdog(settings: dict[str, Any]) -> int:
    """Start the standby, which starts the watchdog, with its sockets; return the port for heartbeats, 0 on one host."""
    listener, folder = channel.listen(settings["name"])
    other_hosts = settings["world_size"] > settings["local_world_size"]
    sockets = [listener, *([open_heartbeat_socket()] if other_hosts else [])]
    passed = [each.fileno() for each in sockets]
    port = int(sockets[1].getsockname()[1]) if other_hosts else 0
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = json.dumps(settings | {"sockets": passed, "socket_folder": str(folder)})
    subprocess.run(
        [sys.executable, "-m", "harness.tools.watchdog.standby", words],
        env=os.environ | {"PYTHONPATH": path},
        pass_fds=passed,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        check=True,
    )
    for each in sockets:
        each.close()
    return port
