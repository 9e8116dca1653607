"""The watchdog of one host: a process of its own, which a rank that is stopped, hung or killed cannot stop.

Started by the first rank of each torchrun (see guard.py), it hears from the ranks beside it which phase they are in, and
once a second from the watchdogs of the other hosts. At the first failure anywhere it waits until it may know the cause,
tells it, and ends the ranks of its host, what they started, and torchrun where that hangs. It tells it again once torchrun
has said its own, so that it is the last thing on the screen. Then it ends too.
"""

import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from harness.failures.explain import SECONDS as EXPLANATION_SECONDS
from harness.failures.explain import warm_up
from harness.failures.failure import Failure, Kind, Node, Place, first, names_no_cause
from harness.failures.heartbeat import BEAT_SECONDS, Clock, Heartbeats
from harness.failures.late_report import report_failed_run
from harness.failures.local_rank import LocalRank
from harness.failures.memory_kills import MemoryKills
from harness.failures.processes import Descendants, how_it_ended, is_stopped, lives, say
from harness.failures.shared_memory import SharedMemory
from harness.failures.telling import View
from harness.failures.verdict import Verdict, stderr_of
from harness.rollout.processes import end

TICK_SECONDS = 0.25
QUICK_SECONDS = 0.02
"""Between ticks while a rank waits for us."""
DYING_SECONDS = 0.001
"""Between ticks while a rank dies: of what is known only until torchrun asks, ten times a second."""
SETTLE_SECONDS = 0.5
"""From the first failure to the verdict, at least: the cause may be a moment behind its consequence."""
ORPHANED_SECONDS = 1.5
"""The same at most, once all ranks are gone."""
BETTER_CAUSE_SECONDS = 2.0
"""Beyond lost_host_seconds: how long a cause is awaited for what can only be a consequence."""
LEAVE_SECONDS = 2.0
"""From the order to leave to SIGKILL."""
LAUNCHER_SECONDS = 4.0
"""How long torchrun may stay when all its ranks are gone: it may hang in a store that no longer answers."""
MISTAKE_SECONDS = 5.0
"""How long ranks may take to leave by themselves after one of them has said a mistake."""
JOIN_SECONDS = 60.0
"""How long a rank of this host may come after the one before it."""
MEET_SECONDS = 3.0
"""How long ranks that have met wait for their hosts' first beats."""
COLLECT_SECONDS = 8.0
"""How long ranks stay after a deadline, at most, for what is to be seen of them."""
LATE_SECONDS = 3.0
"""By how much a rank must come after all others of its host to a phase of a step to be told of."""
FAREWELLS = 5
"""Last beats, of which one must arrive, or the other hosts take this one for lost."""
FAILED, TIMED_OUT = 1, 124
SILENCE = """warning: {host} has not heard {there} in {seconds:g} s; UDP between the hosts may be blocked, and a host that is \
lost will only show by what it does to the others
"""


@dataclass(kw_only=True, slots=True)
class Watchdog:
    """See the module. One thread; whatever takes time is a call of serve."""

    ranks_door: socket.socket
    hosts_door: socket.socket | None
    launcher: psutil.Process
    is_torchrun: bool
    """Whether the launcher is ours to end."""
    name: str
    host: str
    world_size: int
    local_world_size: int
    idle_seconds: float
    lost_host_seconds: float
    clock: Clock = field(default_factory=Clock)
    ranks: list[LocalRank] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    beats: Heartbeats | None = None
    folder: Path | None = None
    own: list[Failure] = field(default_factory=list)
    """Failures that were noticed on this host."""
    descendants: Descendants = field(default_factory=Descendants)
    shared: SharedMemory = field(default_factory=SharedMemory)
    memory_kills: MemoryKills = field(default_factory=MemoryKills)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _beaten: float = 0.0
    _looked: float = 0.0
    _warned: bool = False
    _news: bool = False
    _noticed: float = 0.0
    _met: float = 0.0
    _welcomed: float = field(default_factory=time.monotonic)

    def watch(self) -> None:
        """From the first rank's arrival until nothing of this host's run is left."""
        screen = stderr_of(self.launcher.pid)
        self._selector.register(self.ranks_door, selectors.EVENT_READ)
        self.serve(lambda: bool(self.failures()) or self.is_over())
        has_failed = bool(self.failures()) and self.end_run(screen)
        self.shared.remove()
        for _ in range(FAREWELLS if self.beats else 0):
            self.beat(left=True)
            time.sleep(QUICK_SECONDS)
        if has_failed and self.folder and any(each.rank == 0 for each in self.ranks):
            report_failed_run(self.folder)

    def end_run(self, screen: int) -> bool:
        """Something has failed: tell what, here and last on the screen (a descriptor), and end what is left. False where a
        rank has said its mistake, and all have left by themselves."""
        self._noticed = time.monotonic()
        warm_up()
        self.serve(self.is_decided)
        cause = first(self.failures())
        if cause.kind == "mistake":  # its rank has said it
            self.serve(self.all_gone, MISTAKE_SECONDS)
            if self.all_gone():
                return False
        verdict = Verdict(self.host, self.folder, self.failures(), self.view())
        verdict.explanation.begin()
        if cause.code == TIMED_OUT:
            self.collect(verdict)
        self.serve(lambda: verdict.explanation.is_there, EXPLANATION_SECONDS)
        torchrun_speaks = self.is_torchrun and lives(self.launcher)
        verdict.say()
        self.end_all(cause.code)
        if torchrun_speaks:
            verdict.say(screen)
        return True

    def serve(self, until: Callable[[], bool], seconds: float = float("inf")) -> None:
        """Hear ranks and hosts, and look after them, until it is so or that time has passed."""
        given_up = time.monotonic() + seconds
        while not until() and time.monotonic() < given_up:
            dying = any(each.closed and not each.gone for each in self.ranks)
            hurry = QUICK_SECONDS if any(each.meets for each in self.ranks) else TICK_SECONDS
            for key, _ in self._selector.select(DYING_SECONDS if dying else hurry):
                if key.fileobj is self.ranks_door:
                    self.welcome()
                elif key.fileobj is self.hosts_door and self.beats:
                    self.beats.listen()
                elif key.data is not None:
                    self.hear(key.data)
            self.look()

    def failures(self) -> list[Failure]:
        """Of all hosts, as far as known here; a lost host once."""
        everywhere = list(self.own)
        for peer in self.beats.peers.values() if self.beats else ():
            everywhere += peer.failures
        once: dict[Any, Failure] = {}
        for failure in sorted(everywhere, key=lambda each: each.time):
            key = (failure.kind, failure.host) if failure.kind == "lost" else id(failure)
            once.setdefault(key, failure)
        return list(once.values())

    def is_over(self) -> bool:
        """Whether every rank has left by itself, or none will come any more."""
        all_came = len(self.ranks) >= self.local_world_size
        none_comes = time.monotonic() - self._welcomed > JOIN_SECONDS or not lives(self.launcher)
        return self.all_gone() and (all_came or none_comes)

    def all_gone(self) -> bool:
        """Whether no rank that ever came is there."""
        return all(each.gone for each in self.ranks)

    def is_decided(self) -> bool:
        """Whether the first failure that is known will remain the first."""
        cause, waited = first(self.failures()), time.monotonic() - self._noticed
        elsewhere = self.lost_host_seconds if self.beats else 0.0
        if waited < SETTLE_SECONDS:
            return False
        if waited > elsewhere + BETTER_CAUSE_SECONDS:
            return True
        if self.all_gone() and not lives(self.launcher):
            return waited > ORPHANED_SECONDS or not names_no_cause(cause)
        # A host that is about to be found lost was so before whatever came of it.
        return not names_no_cause(cause) and (self.beats is None or self.beats.all_heard_since(cause.time))

    def view(self) -> View:
        """What is known here of the whole job."""
        return View(now=self.clock.now(), world_size=self.world_size, places=self.places(), hosts=self.hosts())

    def collect(self, verdict: Verdict) -> None:
        """Where everything is, before it is ended."""
        for each in self.ranks if self.folder else ():
            self._send(each, {"dump": str(self.folder)})
        self._look_at_processes()
        verdict.collect([each.asked() for each in self.ranks if each.lives()], self.descendants.known)
        self.serve(lambda: verdict.has_collected, COLLECT_SECONDS)

    def end_all(self, code: int) -> None:
        """Ranks leave by order, or are killed; so is all that they started, and torchrun if it stays."""
        self._look_at_processes()
        for each in self.ranks:
            self._send(each, {"leave": code})
        self.serve(self.all_gone, LEAVE_SECONDS)
        self._look_at_processes()
        self._look_at_memory()
        self.descendants.look_for_orphans(self.name)
        stubborn = {each.process.pid: each.process for each in self.ranks if each.process and each.lives()}
        end(stubborn | self.descendants.known, patience_seconds=0)
        if self.is_torchrun:
            self._end_launcher()

    def _end_launcher(self) -> None:
        self.serve(lambda: not lives(self.launcher), LAUNCHER_SECONDS)
        if not lives(self.launcher) or any(map(lives, self.launcher.children())):
            return
        say(
            f"torchrun on {self.host} (pid {self.launcher.pid}) is still there {LAUNCHER_SECONDS:g} s after its ranks: ended\n"
        )
        end({self.launcher.pid: self.launcher}, patience_seconds=1.0)

    def welcome(self) -> None:
        """A rank has come."""
        line, _ = self.ranks_door.accept()
        line.setblocking(False)
        self._welcomed = time.monotonic()
        self._selector.register(line, selectors.EVENT_READ, LocalRank(line, self._welcomed))

    def hear(self, rank: LocalRank) -> None:
        """Take in what a rank says."""
        for message in rank.hear():
            self._take(rank, message)
        if rank.closed:
            self._selector.unregister(rank.line)

    def _take(self, rank: LocalRank, message: dict[str, Any]) -> None:
        now = time.monotonic()
        match message["say"]:
            case "hello":
                rank.rank, rank.pid, rank.handler = message["rank"], message["pid"], message["handler"]
                with suppress(psutil.NoSuchProcess):  # it has died already, which is about to be seen
                    rank.process = psutil.Process(rank.pid)
                self.ranks.append(rank)
            case "begins":
                rank.begin(message["phase"], message["step"], message["deadline"], now)
                if message["step"] is not None and (seconds := rank.came_after(self.ranks, now)) > LATE_SECONDS:
                    say(
                        f"slow: rank {rank.rank} came {seconds:.1f} s after the others on {self.host} to {rank.where}\n"
                    )
            case "ends":
                rank.end(message["phase"], now)
            case "failed":
                kind: Kind = "echo" if message["echo"] else "exception"
                self._fail(rank, kind, message["error"] + self._struck(message["error"]), trace=tuple(message["trace"]))
            case "bye":
                rank.left = message["code"]
                if rank.left:
                    self._fail(rank, "mistake", f"ended with exit code {rank.left}", code=rank.left)
            case "flush":
                if self.beats:
                    self.beat()
                self._send(rank, {"done": True})
            case "peers":
                rank.meets = True
                self.folder = Path(message["folder"])
                if self.beats is None and self.hosts_door is not None:
                    self._meet(message)
        self._news = True

    def _meet(self, message: dict[str, Any]) -> None:
        assert self.hosts_door is not None
        self._selector.register(self.hosts_door, selectors.EVENT_READ)
        self.nodes = [Node(**each | {"ranks": tuple(each["ranks"])}) for each in message["nodes"]]
        self.beats = Heartbeats(
            socket=self.hosts_door,
            nodes=self.nodes,
            own=message["own"],
            run=message["run"],
            lost_seconds=self.lost_host_seconds,
            now=self.clock.now,
        )
        self._met = time.monotonic()

    def look(self) -> None:
        """See who died, hangs or is silent; beat."""
        now = time.monotonic()
        for rank in self.ranks:
            self._look_at(rank, now)
        for peer in self.beats.newly_lost() if self.beats else ():
            assert peer.heard is not None
            place = max(peer.places.values(), key=lambda each: each.progress, default=Place())
            self._note(Failure(kind="lost", time=peer.heard, host=peer.node.host, ranks=peer.node.ranks, place=place))
        self._look_at_memory()
        if now - self._looked > BEAT_SECONDS:
            self._looked = now
            self._look_at_processes()
            self._look_at_launcher()
            self._warn_of_silence()
        silent = self.beats.silent() if self.beats else []
        every = BEAT_SECONDS if not silent or now - self._met > MEET_SECONDS else QUICK_SECONDS
        if self.beats and (self._news or now - self._beaten > every):
            self._news, self._beaten = False, now
            self.beat()
        if not silent or now - self._met > MEET_SECONDS:
            self._let_go_on()

    def beat(self, left: bool = False) -> None:
        """Tell the other hosts."""
        assert self.beats is not None
        self.beats.beat({each.rank: each.place for each in self.ranks}, self.own, left)

    def _let_go_on(self) -> None:
        """The hosts have heard each other, or never will: no phase begins before, or a host lost in it was never known."""
        for rank in self.ranks:
            if rank.meets:
                rank.meets = False
                self._send(rank, {"done": True})

    def _send(self, rank: LocalRank, message: dict[str, Any]) -> None:
        with suppress(OSError):  # it has just died
            rank.send(message)

    def _look_at(self, rank: LocalRank, now: float) -> None:
        if rank.gone:
            return
        if rank.closed and (ended := how_it_ended(rank.pid)):
            self._died(rank, ended)
        elif (rank.closed or now - self._looked > BEAT_SECONDS) and not rank.lives():
            self._died(rank, "" if self.is_torchrun else "died, and nothing says of what,")
        elif (seconds := rank.overdue(now, self.idle_seconds)) is not None:
            self._fail(rank, "stopped" if is_stopped(rank.pid) else "deadline", seconds=seconds, code=TIMED_OUT)

    def _died(self, rank: LocalRank, ended: str) -> None:
        rank.gone = True
        if rank.left is None and not rank.failed:
            told = any(name in ended for name in ("SIGTERM", "SIGINT", "SIGHUP"))
            if struck := self._struck(ended):
                ended += f"{struck},"
            self._fail(rank, "ended" if told else "died" if ended else "vanished", ended)

    def _struck(self, how: str) -> str:
        """What to add where SIGKILL ended a rank, or a process of its engine, and was the kernel's."""
        struck = "SIGKILL" in how and self.memory_kills.seen()
        return f", and {struck}" if struck else ""

    def _fail(
        self,
        rank: LocalRank,
        kind: Kind,
        detail: str = "",
        seconds: float = 0.0,
        code: int = FAILED,
        trace: tuple[str, ...] = (),
    ) -> None:
        if rank.failed is None or (rank.failed == "echo" and kind == "exception"):
            rank.failed = kind
            failure = Failure(kind=kind, time=self.clock.now(), host=self.host, ranks=(rank.rank,), place=rank.place)
            self._note(replace(failure, detail=detail, seconds=seconds, code=code, trace=trace))

    def _note(self, failure: Failure) -> None:
        self.own.append(failure)
        self._news = True

    def _look_at_processes(self) -> None:
        self.descendants.look(each.process.pid for each in self.ranks if each.process and not each.gone)

    def _look_at_memory(self) -> None:
        self.shared.look([*(each.pid for each in self.ranks), *self.descendants.known])

    def _look_at_launcher(self) -> None:
        staying = [each for each in self.ranks if not each.gone and each.left is None]
        if staying and not lives(self.launcher) and not any(each.kind == "launcher" for each in self.own):
            ranks, detail = tuple(each.rank for each in staying), f"(pid {self.launcher.pid}) is gone"
            failure = Failure(
                kind="launcher", time=self.clock.now(), host=self.host, ranks=ranks, place=staying[0].place
            )
            self._note(replace(failure, detail=detail))

    def _warn_of_silence(self) -> None:
        if self.beats and not self._warned and time.monotonic() - self._met > self.lost_host_seconds:
            if there := ", ".join(f"{node} at {node.address} port {node.port}" for node in self.beats.silent()):
                say(SILENCE.format(host=self.host, there=there, seconds=self.lost_host_seconds))
            self._warned = bool(there)

    def places(self) -> dict[int, Place]:
        """Where each rank is that was heard of."""
        places = {each.rank: each.place for each in self.ranks}
        for peer in self.beats.peers.values() if self.beats else ():
            places |= peer.places
        return places

    def hosts(self) -> dict[int, str]:
        """The host of each rank, once all have met; before, of our own."""
        own = {each.rank: self.host for each in self.ranks}
        return {rank: node.host for node in self.nodes for rank in node.ranks} | own
