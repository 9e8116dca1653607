"""The watchdog of one host: a separate process, so that a rank that is stopped, hung or killed cannot stop it.

The ranks of its host tell it which phase they are in; the watchdogs of the other hosts send a beat each second. At the
first failure anywhere it waits until it can know the cause, reports it, and ends the ranks of its host, what they
started, and torchrun if that hangs. Below torchrun's own report one line says it again, and it exits.

Started by the first rank of a torchrun: `python -m harness.tools.watchdog.watchdog SETTINGS ...` (see client.py).
"""

import json
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from harness.runtime.errors import screen_of, tell_said
from harness.runtime.events import phase_of_step, unix_seconds
from harness.runtime.failure import Failure, Kind
from harness.runtime.processes import is_alive
from harness.tools.run_tree import name_and_pid
from harness.tools.watchdog import channel
from harness.tools.watchdog.channel import (
    BEAT_SECONDS,
    LONGEST_MESSAGE,
    Heartbeats,
    MalformedError,
    WatchdogSettings,
    parse,
)
from harness.tools.watchdog.deaths import ExitWatch, MemoryKills, in_words
from harness.tools.watchdog.ending import (
    STORE_LOST_SECONDS,
    TORCHRUN_SECONDS,
    HostCleanup,
    is_stopped,
    keep_and_report,
    say_in_time,
)
from harness.tools.watchdog.failures import JobView, Place, first_failure, names_no_cause
from harness.tools.watchdog.verdict import RunVerdict

TICK_SECONDS = 0.25
QUICK_SECONDS = 0.02  # between ticks while a rank waits for an answer, or has ended and torchrun is about to
SETTLE_SECONDS = 0.5  # from the first failure to the verdict, at least: the cause may be noticed after a consequence
BETTER_CAUSE_SECONDS = 2.0  # beyond heartbeat_timeout: how long to wait for the cause of what can only be a consequence
MISTAKE_SECONDS = 5.0  # ranks may take so long to exit on their own after one of them reported a user error
JOIN_SECONDS = 60.0  # a rank of this host may come so long after the one before it
MEET_SECONDS = 3.0  # ranks that have met wait so long for the first beats of all hosts
LEAVE_SECONDS = 2.0  # from the order to exit to SIGKILL
COLLECT_SECONDS = 8.0  # ranks stay so long after a deadline, at most, for their stacks to be taken
LATE_SECONDS = 3.0  # a rank that comes so long after all others of its host to a phase of a step is reported
EXPLANATION_SECONDS = 3.0  # how long the verdict waits for its explanation
TIMED_OUT = 124


@dataclass(slots=True)
class LocalRank:
    """A rank of this host: its process, its connection, and how far it has come."""

    line: socket.socket
    moved: float  # time.monotonic() when it last began or left a phase
    pid: int  # from the kernel
    rank: int = -1  # -1 until it has reported its number
    exit: ExitWatch | None = None
    process: psutil.Process | None = None
    handler: int | None = None  # its descriptor of the memory into which its faulthandler writes; see verdict.py
    left: int | None = None  # the exit code with which it reported that it exits
    failed: Kind | None = None  # the kind of its failure; what it does after that is a consequence
    closed: bool = False  # its connection is closed: it has died, or is about to
    gone: bool = False
    meets: bool = False  # it waits for the hosts to hear each other
    place: Place = field(default_factory=Place)
    due: float | None = None  # when its time limit passes, by time.monotonic()
    limit: float = 0.0  # the length of that limit in seconds

    def send(self, **message: Any) -> None:
        with suppress(OSError):
            self.line.send(json.dumps(message).encode())

    def stays(self) -> bool:
        """Return whether it has neither ended nor said that it exits."""
        return not self.gone and self.left is None

    def has_ended(self) -> bool:
        return (
            self.exit is not None and self.exit.over.is_set() and (self.exit.status is not None or not self.is_alive())
        )

    def is_alive(self) -> bool:
        return not self.gone and self.process is not None and is_alive(self.process)


@dataclass(slots=True)
class Watchdog:
    """See the module. One thread: all waiting is done in serve(), which keeps hearing ranks and hosts."""

    settings: WatchdogSettings
    launcher: psutil.Process
    listener: socket.socket
    hosts_socket: socket.socket | None
    ranks: list[LocalRank] = field(default_factory=list)
    beats: Heartbeats | None = None
    folder: Path | None = None  # the run directory
    name: str = ""  # in the run directory; "" before the ranks have met
    own: list[Failure] = field(default_factory=list)  # failures that were noticed on this host
    cleanup: HostCleanup = field(init=False)
    memory_kills: MemoryKills = field(default_factory=MemoryKills)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _last_came: float = field(default_factory=time.monotonic)  # when a rank connected last
    _stopped: dict[int, int] = field(default_factory=dict)  # pid of a stopped process -> in how many looks it was
    _beaten: float = 0.0
    _looked: float = 0.0
    _news: bool = False
    _noticed: float = 0.0
    _met: float = 0.0
    _warn_at: float = math.inf  # when to warn of hosts that were never heard

    def __post_init__(self) -> None:
        self.cleanup = HostCleanup(self.settings, self._processes, self.serve)
        self._selector.register(self.listener, selectors.EVENT_READ)

    def watch(self) -> None:
        """Watch from the first rank's arrival until nothing of this host's run is left."""
        screen = screen_of(self.launcher.pid)
        self.serve(lambda: bool(self._failures()) or self._is_over())
        verdict = self._end_run(screen) if self._failures() else None
        self.cleanup.remove_files()
        if self.beats:
            self.beats.say_farewell(self._places(), self.own, left=True)
        if verdict:
            keep_and_report(verdict, reports=any(each.rank == 0 for each in self.ranks))
            if self.settings.holds is not None:  # launch/torchrun.py has waited for this process so far
                os.close(self.settings.holds)
                self._end_torchrun()

    def _end_run(self, screen: int) -> RunVerdict | None:
        """Report the first failure and end what is left. screen: where torchrun writes, a descriptor.

        torchrun itself prints a report below the verdict; a line below that repeats the verdict's first one. Return
        None if a rank reported a user error, and all ranks have exited on their own.
        """
        self._noticed = time.monotonic()
        self.serve(self._is_decided)
        if first_failure(self._failures()).kind == "mistake":  # its rank has printed it
            self.serve(self._all_gone, MISTAKE_SECONDS)
            if self._all_gone():
                return None
        verdict = RunVerdict(self.name, self.folder, self._failures(), self._view())
        if verdict.cause.code == TIMED_OUT:
            self._collect(verdict)
        self.serve(verdict.explanation.done, EXPLANATION_SECONDS)
        self._look_at_processes()
        for each in self.ranks:
            each.send(leave=verdict.cause.code)
        is_plain = self.settings.is_torchrun and self.settings.holds is None
        torchrun_reports = is_plain and is_alive(self.launcher)
        say_in_time(verdict.text(f"the watchdog on {self.settings.host}"))
        if verdict.cause.kind not in ("told", "ended"):  # of a signal its launcher knows more
            tell_said()
        self.cleanup.end_ranks(LEAVE_SECONDS)
        if is_plain:
            self._end_torchrun()
        if torchrun_reports:
            say_in_time(verdict.in_a_line(), screen)
        return verdict

    def _end_torchrun(self) -> None:
        lost = any(each.kind == "lost" for each in self._failures())
        self.cleanup.end_torchrun(self.launcher, STORE_LOST_SECONDS if lost else TORCHRUN_SECONDS)

    def _collect(self, verdict: RunVerdict) -> None:
        """Take stacks and other evidence of what hangs, before anything is ended."""
        for each in self.ranks:
            each.send(dump=True)
        self._look_at_processes()
        alive = {each.rank: (each.pid, each.handler) for each in self.ranks if each.is_alive()}
        self.serve(verdict.begin_to_collect(alive, self.cleanup.descendants.known).done, COLLECT_SECONDS)

    def serve(self, until: Callable[[], bool], seconds: float = math.inf) -> None:
        """Hear ranks and hosts, and look after them, until the condition holds or the time has passed."""
        given_up = time.monotonic() + seconds
        while not until() and time.monotonic() < given_up:
            quick = any(each.meets or each.closed for each in self.ranks)
            for key, _ in self._selector.select(QUICK_SECONDS if quick else TICK_SECONDS):
                if key.fileobj is self.listener:
                    self._accept()
                elif key.fileobj is self.hosts_socket and self.beats:
                    self.beats.listen()
                elif key.data is not None:
                    self._hear(key.data)
            self.look()

    def _failures(self) -> list[Failure]:
        """Return the failures of all hosts that are known here; a lost host once."""
        everywhere = [*self.own, *(self.beats.failures() if self.beats else ())]
        once: dict[Any, Failure] = {}
        for failure in sorted(everywhere, key=lambda each: each.time):
            once.setdefault((failure.kind, failure.ranks) if failure.kind == "lost" else id(failure), failure)
        return list(once.values())

    def _is_over(self) -> bool:
        """Return whether every rank has exited on its own, or none will come any more."""
        all_came = len(self.ranks) >= self.settings.local_world_size
        none_comes = time.monotonic() - self._last_came > JOIN_SECONDS or not is_alive(self.launcher)
        return self._all_gone() and (all_came or none_comes)

    def _all_gone(self) -> bool:
        return all(each.gone for each in self.ranks)

    def _is_decided(self) -> bool:
        """Return whether the first failure that is known will remain the first."""
        cause, waited = first_failure(self._failures()), time.monotonic() - self._noticed
        elsewhere = self.settings.heartbeat_timeout if self.beats else 0.0
        if waited < SETTLE_SECONDS:
            return False
        if waited > elsewhere + BETTER_CAUSE_SECONDS:
            return True
        # A host that is about to be found lost was lost before its consequences.
        return not names_no_cause(cause) and (self.beats is None or self.beats.all_heard_since(cause.time))

    def _places(self) -> dict[int, Place]:
        return {each.rank: each.place for each in self.ranks}

    def _view(self) -> JobView:
        places, hosts = self._places(), {each.rank: self.settings.host for each in self.ranks}
        for peer in self.beats.peers.values() if self.beats else ():
            places |= peer.places
            hosts |= dict.fromkeys(peer.node.ranks, peer.node.host)
        return JobView(now=unix_seconds(), world_size=self.settings.world_size, places=places, hosts=hosts)

    def _accept(self) -> None:
        """Take a new connection of a process of this user; it is not known as a rank yet."""
        with suppress(OSError):  # it has gone again
            line, _ = self.listener.accept()
            pid, uid = channel.peer_of(line)
            if uid != os.geteuid():
                line.close()
                return
            line.setblocking(False)
            self._last_came = time.monotonic()
            self._selector.register(line, selectors.EVENT_READ, LocalRank(line, self._last_came, pid))

    def _hear(self, rank: LocalRank) -> None:
        """Process the messages of a rank; a malformed one closes a connection that has not reported its rank yet."""
        while not rank.closed:
            try:
                packet = rank.line.recv(LONGEST_MESSAGE)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it left without reading our last message; Linux says so before it gives its own last ones
            except OSError:
                packet = b""
            if not packet:
                rank.closed = True
                break
            try:
                self._take(rank, parse(packet))
            except MalformedError as error:
                rank.closed = rank.rank < 0
                say_in_time(f"warning: the watchdog of {self.settings.host} ignores {error} from process {rank.pid}\n")
        self._selector.unregister(rank.line)
        if rank.rank < 0:
            rank.line.close()

    def _take(self, rank: LocalRank, message: channel.Message) -> None:
        now = time.monotonic()
        if isinstance(message, channel.Hello) == (rank.rank >= 0):
            raise MalformedError("a message out of turn")
        match message:
            case channel.Hello(number, handler):
                self._admit(rank, number, handler)
            case channel.Moved(place, begins, due, limit):
                rank.place, rank.due, rank.limit, rank.moved = place, due, limit, now
                if begins and place.step is not None:
                    self._compare_arrival(rank, now)
            case channel.Failed(kind, error, trace):
                of_engine = [pid for pid, owner in self.cleanup.descendants.rank_of.items() if owner == rank.pid]
                kill = self._memory_kill(of_engine) if "SIGKILL" in error else ""
                self._fail(rank, kind, error + kill, traceback=trace)
            case channel.Exits(code):
                rank.left = code
                if code:
                    self._fail(rank, "mistake", f"ended with exit code {code}", code=code)
            case channel.Met():
                rank.meets, self.folder, self.name = True, Path(message.folder), message.launcher
                if self.beats is None and self.hosts_socket is not None:
                    self._selector.register(self.hosts_socket, selectors.EVENT_READ)
                    seconds = self.settings.heartbeat_timeout
                    self.beats = Heartbeats(self.hosts_socket, message, seconds, unix_seconds)
                    self._met, self._warn_at = now, now + seconds
            case channel.Flush():
                self._beat()
                rank.send(done=True)
        self._news = True

    def _admit(self, rank: LocalRank, number: int, handler: int | None) -> None:
        """Note which rank it is. Raise MalformedError if it cannot be that, or is no process of this torchrun."""
        if not 0 <= number < self.settings.world_size or any(each.rank == number for each in self.ranks):
            raise MalformedError(f"rank {number}, which is not expected")
        with suppress(psutil.NoSuchProcess):  # it has died already, which is about to be seen
            rank.process = psutil.Process(rank.pid)
            if is_alive(self.launcher) and self.launcher not in rank.process.parents():
                raise MalformedError("a process that torchrun did not start")
        rank.rank, rank.handler = number, handler
        rank.exit = ExitWatch(rank.pid)
        self.ranks.append(rank)
        if len(self.ranks) == self.settings.local_world_size:
            Path(self.listener.getsockname()).unlink(missing_ok=True)

    def _compare_arrival(self, rank: LocalRank, now: float) -> None:
        """Report a rank that comes long after all others of its host to a phase of a step."""
        others = [each for each in self.ranks if each is not rank]
        if others and all(each.place == rank.place for each in others):
            late, place = now - max(each.moved for each in others), phase_of_step(rank.place.phase, rank.place.step)
            if late > LATE_SECONDS:
                others_there = f"the others on {self.settings.host} to {place}"
                say_in_time(f"slow: rank {rank.rank} came {late:.1f} s after {others_there}\n")

    def look(self) -> None:
        """See which rank died or hangs and which host is silent; send beats."""
        now = time.monotonic()
        for rank in [each for each in self.ranks if not each.gone]:
            if rank.has_ended():
                if not rank.closed:
                    self._hear(rank)  # it may have said goodbye since we last listened
                self._note_end(rank)
            elif rank.due is not None and now > rank.due and rank.left is None and not rank.failed:
                for pid, owner in self._stopped_now(by_debugger=True).items():  # of any rank on this host
                    self._fail_stopped(pid, owner, rank.limit)
                self._fail(rank, "deadline", seconds=rank.limit, code=TIMED_OUT)
        self.cleanup.shared.look([*(each.pid for each in self.ranks), *self.cleanup.descendants.known])
        if now - self._looked > BEAT_SECONDS:
            self._looked = now
            self._look_at_processes()
            self._look_for_stopped(now)
        self._look_at_launcher()  # each time: the ranks go on, and the verdict says where they were
        waits_for_beats = self.beats is not None and self._look_at_hosts(self.beats, now)
        if not waits_for_beats:  # no phase begins before, or a host that is lost in it was never heard
            for rank in (each for each in self.ranks if each.meets):
                rank.meets = False
                rank.send(done=True)

    def _look_at_hosts(self, beats: Heartbeats, now: float) -> bool:
        """Note the hosts that are lost, and send a beat; return whether the first beats of others may still come."""
        for peer in beats.newly_lost():
            place = max(peer.places.values(), key=lambda each: each.progress, default=Place())
            self._note("lost", peer.node.ranks, place, time=peer.heard, host=peer.node.host)
        silent = beats.silent()
        if now > self._warn_at:
            self._warn_at = math.inf
            for node in silent:
                silence = f"{self.settings.host} got no heartbeat from {node} at {node.address} port {node.port}"
                advice = (
                    "UDP between the hosts may be blocked; a lost host will then only show as errors of the other ranks"
                )
                say_in_time(f"warning: {silence} in {self.settings.heartbeat_timeout:g} s; {advice}\n")
        waits = bool(silent) and now - self._met <= MEET_SECONDS
        if self._news or now - self._beaten > (QUICK_SECONDS if waits else BEAT_SECONDS):
            self._beat()
        return waits

    def _beat(self) -> None:
        if self.beats:
            self._news, self._beaten = False, time.monotonic()
            self.beats.beat(self._places(), self.own)

    def _stopped_now(self, by_debugger: bool) -> dict[int, LocalRank]:
        """Return which processes are stopped, of ranks that have not ended: the pid, and the rank it belongs to."""
        owners = {each.pid: each for each in self.ranks if each.stays()}
        of_engines = {pid: self.cleanup.descendants.rank_of.get(pid, 0) for pid in self.cleanup.descendants.known}
        ranks = {pid: rank for pid, rank in of_engines.items() if rank in owners} | {pid: pid for pid in owners}
        return {pid: owners[rank] for pid, rank in ranks.items() if is_stopped(pid, by_debugger)}

    def _look_for_stopped(self, now: float) -> None:
        """Report a process that has been stopped for long, and whose rank has not moved for as long.

        It is seen once a second, and each time counts a second: whoever stops the whole job stops this process too, and
        all continue together. A process that a debugger holds may take as long as its phase.
        """
        stopped = {} if is_stopped(self.launcher.pid) else self._stopped_now(by_debugger=False)
        self._stopped = {pid: self._stopped.get(pid, 0) + 1 for pid in stopped}
        seconds = self.settings.stopped_seconds
        for pid, owner in stopped.items():
            if min(self._stopped[pid] * BEAT_SECONDS, now - owner.moved) > seconds:
                self._fail_stopped(pid, owner, seconds)

    def _fail_stopped(self, pid: int, owner: LocalRank, seconds: float) -> None:
        process = self.cleanup.descendants.known.get(pid)
        detail = f"engine process {name_and_pid(process)}" if process else ""
        self._fail(owner, "stopped", detail, seconds=seconds, code=TIMED_OUT)

    def _note_end(self, rank: LocalRank) -> None:
        rank.gone = True
        if rank.left is not None or rank.failed:
            return
        status = rank.exit.status if rank.exit else None
        if status is None:
            self._fail(rank, "vanished", "died")
            return
        kind: Kind = "ended" if status & 0x7F in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) else "died"
        kill = self._memory_kill([rank.pid]) if status & 0x7F == signal.SIGKILL else ""
        self._fail(rank, kind, in_words(status) + kill + ("," if kill else ""))

    def _memory_kill(self, pids: Iterable[int]) -> str:
        """Return what to add if the kernel's out-of-memory killer ended one of these processes."""
        evidence = next(filter(None, map(self.memory_kills.killed, pids)), "")
        return f", and {evidence}" if evidence else ""

    def _fail(self, rank: LocalRank, kind: Kind, error: str = "", **details: Any) -> None:
        """Note a failure of a rank, unless it follows from an earlier one. details: other fields of Failure."""
        if rank.failed is None or (rank.failed == "echo" and kind == "exception"):
            rank.failed = kind
            self._note(kind, (rank.rank,), rank.place, error=error, **details)

    def _note(self, kind: Kind, ranks: tuple[int, ...], place: Place, **details: Any) -> None:
        values: dict[str, Any] = {"time": unix_seconds(), "host": self.settings.host} | details
        values |= {"phase": place.phase, "step": place.step, "inside": place.inside}
        self.own.append(Failure(kind=kind, ranks=ranks, **values))
        self._news = True

    def _look_at_launcher(self) -> None:
        """Note its end once, and only while it has ranks."""
        staying = [each for each in self.ranks if each.stays()]
        if staying and not is_alive(self.launcher) and not any(each.kind == "launcher" for each in self.own):
            ranks = tuple(each.rank for each in staying)
            self._note("launcher", ranks, staying[0].place, error=f"(pid {self.launcher.pid}) is gone")

    def _processes(self) -> list[psutil.Process]:
        return [each.process for each in self.ranks if each.process and not each.gone]

    def _look_at_processes(self) -> None:
        alive = self.cleanup.look()
        self.memory_kills.look([*alive, *self.cleanup.descendants.known])


def main(words: list[str]) -> None:
    """Watch one run on this host. words: the settings as JSON, and the descriptors of the sockets."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the run, whose end is noticed
    settings = WatchdogSettings(**json.loads(words[0]))
    listener, *hosts = (socket.socket(fileno=int(each)) for each in words[1:])
    Watchdog(settings, psutil.Process(settings.launcher), listener, hosts[0] if hosts else None).watch()
    os._exit(0)  # without waiting for threads


if __name__ == "__main__":
    main(sys.argv[1:])
