"""The watchdog of one host: a process of its own, which a rank that is stopped, hung or killed cannot stop.

Started by the first rank of each torchrun (see guard.py), it hears from the ranks beside it which phase they are in, and
once a second from the watchdogs of the other hosts. It says once a second that it is there, to its ranks and to the standby
beside it (see standby.py), which ends the run where it is not. At the first failure anywhere it waits until it may know the cause,
tells it, and ends the ranks of its host, what they started, and torchrun where that hangs. It tells it again once torchrun
has said its own, so that it is the last thing on the screen. Then it ends too.
"""

import re
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.runtime.processes import is_stopped, name_and_pid
from harness.tools.watchdog.ending import Ending
from harness.tools.watchdog.explain import SECONDS as EXPLANATION_SECONDS
from harness.tools.watchdog.explain import warm_up
from harness.tools.watchdog.failure import Failure, Kind, Node, Place, first, names_no_cause
from harness.tools.watchdog.heartbeat import BEAT_SECONDS, Clock, Heartbeats
from harness.tools.watchdog.launcher import Launcher
from harness.tools.watchdog.local_rank import LocalRank
from harness.tools.watchdog.memory_kills import MemoryKills
from harness.tools.watchdog.messages import MalformedError, parse
from harness.tools.watchdog.rank_listener import RankListener
from harness.tools.watchdog.silence import Stopped
from harness.tools.watchdog.snapshot import Snapshot
from harness.tools.watchdog.telling import View
from harness.tools.watchdog.verdict import Verdict, stderr_of

TICK_SECONDS = 0.25
QUICK_SECONDS = 0.02
"""Between ticks while a rank waits for us, or has ended, and torchrun is about to."""
SETTLE_SECONDS = 0.5
"""From the first failure to the verdict, at least: the cause may be a moment behind its consequence."""
ORPHANED_SECONDS = 1.5
"""The same at most, once all ranks are gone."""
BETTER_CAUSE_SECONDS = 2.0
"""Beyond heartbeat_timeout: how long a cause is awaited for what can only be a consequence."""
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
_PID = re.compile(r"\(pid (\d+)\)")
SILENCE = """warning: {host} has not heard {there} in {seconds:g} s; UDP between the hosts may be blocked, and a host that is \
lost will only show by what it does to the others
"""


@dataclass(kw_only=True, slots=True)
class Watchdog:
    """See the module. One thread; whatever takes time is a call of serve."""

    listener: RankListener
    standby: socket.socket
    """To the process that ends the run where this one does not."""
    hosts_door: socket.socket | None
    launcher: Launcher
    name: str
    host: str
    idle_seconds: float
    heartbeat_timeout: float
    clock: Clock = field(default_factory=Clock)
    ranks: list[LocalRank] = field(init=False)
    nodes: list[Node] = field(default_factory=list)
    beats: Heartbeats | None = None
    folder: Path | None = None
    own: list[Failure] = field(default_factory=list)
    """Failures that were noticed on this host."""
    ending: Ending = field(init=False)
    memory_kills: MemoryKills = field(default_factory=MemoryKills)
    stopped: Stopped = field(default_factory=Stopped)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _beaten: float = 0.0
    _looked: float = 0.0
    _warned: bool = False
    _news: bool = False
    _noticed: float = 0.0
    _met: float = 0.0

    def __post_init__(self) -> None:
        """What it ends with hears the ranks meanwhile."""
        self.ranks = self.listener.ranks
        self.ending = Ending(self.name, self.host, self.launcher, self.serve)

    def watch(self) -> None:
        """From the first rank's arrival until nothing of this host's run is left."""
        screen = stderr_of(self.launcher.pid)
        self._selector.register(self.listener.socket, selectors.EVENT_READ)
        self.serve(lambda: bool(self.failures()) or self.is_over())
        has_failed = bool(self.failures()) and self.end_run(screen)
        self.listener.close()
        self.ending.remove_files()
        for _ in range(FAREWELLS if self.beats else 0):
            self.beat(left=True)
            time.sleep(QUICK_SECONDS)
        if has_failed and self.folder and any(each.rank == 0 for each in self.ranks):
            self.ending.report(self.folder)

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
        self._look_at_processes()
        for each in self.ranks:
            each.send({"leave": cause.code})
        processes = [each.process for each in self.ranks if each.process]
        self.ending.end_and_tell(verdict, screen, processes, self.all_gone)
        return True

    def serve(self, until: Callable[[], bool], seconds: float = float("inf")) -> None:
        """Hear ranks and hosts, and look after them, until it is so or that time has passed."""
        given_up = time.monotonic() + seconds
        while not until() and time.monotonic() < given_up:
            quick = any(each.meets or each.closed for each in self.ranks)
            for key, _ in self._selector.select(QUICK_SECONDS if quick else TICK_SECONDS):
                if key.fileobj is self.listener.socket:
                    for rank in self.listener.accept():
                        self._selector.register(rank.line, selectors.EVENT_READ, rank)
                elif key.fileobj is self.hosts_door and self.beats:
                    self.beats.listen()
                elif key.data is not None:
                    self.hear(key.data)
            self.look()

    def failures(self) -> list[Failure]:
        """Of all hosts, as far as known here; a lost host once."""
        everywhere = [*self.own, *(self.beats.failures() if self.beats else ())]
        once: dict[Any, Failure] = {}
        for failure in sorted(everywhere, key=lambda each: each.time):
            key = (failure.kind, failure.host) if failure.kind == "lost" else id(failure)
            once.setdefault(key, failure)
        return list(once.values())

    def is_over(self) -> bool:
        """Whether every rank has left by itself, or none will come any more."""
        all_came = len(self.ranks) >= self.listener.local_world_size
        none_comes = time.monotonic() - self.listener.last > JOIN_SECONDS or not self.launcher.lives()
        return self.all_gone() and (all_came or none_comes)

    def all_gone(self) -> bool:
        """Whether no rank that ever came is there."""
        return all(each.gone for each in self.ranks)

    def is_decided(self) -> bool:
        """Whether the first failure that is known will remain the first."""
        cause, waited = first(self.failures()), time.monotonic() - self._noticed
        elsewhere = self.heartbeat_timeout if self.beats else 0.0
        if waited < SETTLE_SECONDS:
            return False
        if waited > elsewhere + BETTER_CAUSE_SECONDS:
            return True
        if self.all_gone() and not self.launcher.lives():
            return waited > ORPHANED_SECONDS or not names_no_cause(cause)
        # A host that is about to be found lost was so before whatever came of it.
        return not names_no_cause(cause) and (self.beats is None or self.beats.all_heard_since(cause.time))

    def view(self) -> View:
        """What is known here of the whole job."""
        return View(now=self.clock.now(), world_size=self.listener.world_size, places=self.places(), hosts=self.hosts())

    def collect(self, verdict: Verdict) -> None:
        """Where everything is, before it is ended."""
        for each in self.ranks if self.folder else ():
            each.send({"dump": str(self.folder)})
        self._look_at_processes()
        verdict.collect([each.asked() for each in self.ranks if each.lives()], self.ending.descendants.known)
        self.serve(lambda: verdict.has_collected, COLLECT_SECONDS)

    def hear(self, rank: LocalRank) -> None:
        """Take in what a rank says; what is no message costs a line that has not said who it is."""
        for line in rank.hear():
            try:
                self._take(rank, parse(line))
            except MalformedError as error:
                rank.closed = rank.closed or rank.rank < 0
                self.ending.say(f"warning: the watchdog of {self.host} ignores {error} from process {rank.pid}\n")
        if rank.closed:
            self._selector.unregister(rank.line)
            if rank.rank < 0:
                rank.line.close()
            elif rank.left is None and not rank.failed:
                self.launcher.ask()

    def _take(self, rank: LocalRank, message: dict[str, Any]) -> None:
        now = time.monotonic()
        if (message["say"] == "hello") == (rank.rank >= 0):
            raise MalformedError("a message out of turn")
        match message["say"]:
            case "hello":
                self.listener.admit(rank, message["rank"], message["handler"])
            case "begins":
                rank.begin(message["phase"], message["step"], message["deadline"], now)
                if message["step"] is not None and (seconds := rank.came_after(self.ranks, now)) > LATE_SECONDS:
                    self.ending.say(
                        f"slow: rank {rank.rank} came {seconds:.1f} s after the others on {self.host} to {rank.where}\n"
                    )
            case "ends":
                rank.end(message["phase"], now)
            case "injected":
                rank.injected = message["fault"]
            case "interrupted":
                self.launcher.ask()
                self._fail(rank, "ended", f"was interrupted by {message['signal']}")
            case "failed":
                kind: Kind = "echo" if message["echo"] else "exception"
                named = _PID.search(message["error"])
                error = message["error"] + self._struck(message["error"], int(named[1]) if named else 0)
                self._fail(rank, kind, error, trace=tuple(message["trace"]))
            case "bye":
                rank.left = message["code"]
                if rank.left:
                    self._fail(rank, "mistake", f"ended with exit code {rank.left}", code=rank.left)
            case "flush":
                if self.beats:
                    self.beat()
                rank.send({"done": True})
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
            key=bytes.fromhex(message["key"]),
            lost_seconds=self.heartbeat_timeout,
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
        if self.launcher.got_signal:
            self._note_launcher("told", f"got {self.launcher.got_signal}, as from Ctrl-C, kill or a job scheduler,")
        self.ending.look_at_memory(each.pid for each in self.ranks)
        if now - self._looked > BEAT_SECONDS:
            self._looked = now
            self._look_at_processes()
            self._be_heard()
            if not self.launcher.lives():
                self._note_launcher("launcher", "is gone")
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
                rank.send({"done": True})

    def _look_at(self, rank: LocalRank, now: float) -> None:
        if rank.gone:
            return
        if (how := rank.ended()) is not None:
            self._died(rank, how or ("" if self.launcher.is_torchrun else "died, and nothing says of what,"))
        elif (seconds := rank.overdue(now, self.idle_seconds)) is not None:
            self._pass_deadline(rank, seconds)

    def _pass_deadline(self, rank: LocalRank, seconds: float) -> None:
        """Name what is stopped, of this rank or of any on this host, else the deadline."""
        if is_stopped(rank.pid):
            self._fail(rank, "stopped", seconds=seconds, code=TIMED_OUT)
            return
        for process in self.ending.descendants.stopped():
            pid = self.ending.descendants.rank_of.get(process.pid)
            for owner in (each for each in self.ranks if each.pid == pid):
                self._fail(owner, "stopped", f"engine process {name_and_pid(process)}", seconds=seconds, code=TIMED_OUT)
        self._fail(rank, "deadline", seconds=seconds, code=TIMED_OUT)

    def _died(self, rank: LocalRank, ended: str) -> None:
        rank.gone = True
        if rank.left is None and not rank.failed:
            told = any(name in ended for name in ("SIGTERM", "SIGINT", "SIGHUP"))
            if not rank.injected and (struck := self._struck(ended, rank.pid)):
                ended += f"{struck},"
            self._fail(rank, "ended" if told else "died" if ended else "vanished", ended)

    def _struck(self, how: str, pid: int) -> str:
        """What to add where SIGKILL ended a rank, or a process of its engine, and was the kernel's."""
        struck = "SIGKILL" in how and self.memory_kills.killed(pid)
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
            asked = rank.injected or (next(filter(None, (each.injected for each in self.ranks)), "") if seconds else "")
            self._note(replace(failure, detail=detail, seconds=seconds, code=code, trace=trace, asked=asked))

    def _note(self, failure: Failure) -> None:
        self.own.append(failure)
        self._news = True

    def _look_at_processes(self) -> None:
        ranks = [each.process for each in self.ranks if each.process and not each.gone]
        self.ending.descendants.look(each.pid for each in ranks)
        everything = [*ranks, *self.ending.descendants.known.values()]
        self.memory_kills.look(each.pid for each in everything)
        for each in self.stopped.look(everything):
            self.ending.say(f"slow: {name_and_pid(each)} on {self.host} is stopped (SIGSTOP, or a debugger)\n")

    def _be_heard(self) -> None:
        """By our ranks, and by the standby, which learns what it would have to end."""
        for each in self.ranks:
            if not (each.closed or each.gone):
                each.send({})
        ranks = {each.rank: (each.pid, each.place) for each in self.ranks if not each.gone and each.left is None}
        Snapshot.of(self.folder, ranks, self.ending.descendants.known, self.ending.shared, self.own).send(self.standby)

    def _note_launcher(self, kind: Kind, what: str) -> None:
        """Once, and only while it has ranks."""
        staying = [each for each in self.ranks if each.left is None and not (each.gone and kind == "launcher")]
        if staying and not any(each.kind in ("launcher", "told") for each in self.own):
            ranks, detail = tuple(each.rank for each in staying), f"(pid {self.launcher.pid}) {what}"
            failure = Failure(kind=kind, time=self.clock.now(), host=self.host, ranks=ranks, place=staying[0].place)
            self._note(replace(failure, detail=detail))

    def _warn_of_silence(self) -> None:
        if self.beats and not self._warned and time.monotonic() - self._met > self.heartbeat_timeout:
            if there := ", ".join(f"{node} at {node.address} port {node.port}" for node in self.beats.silent()):
                self.ending.say(SILENCE.format(host=self.host, there=there, seconds=self.heartbeat_timeout))
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
