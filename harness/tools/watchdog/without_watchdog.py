"""What the ranks of a host do when their watchdog is gone: nothing else would notice now that the run hangs.

Each rank ends what it has started, and exits. The first rank that can still act does so last: it reports the failure in
the place of the watchdog, ends the ranks that stay (a stopped one would stay for 30 s), and removes what they leave.
"""

import ctypes
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from harness.runtime import clock, scratch
from harness.runtime.errors import say, say_twice
from harness.runtime.processes import descendants_since, end_processes, is_alive
from harness.tools.watchdog import channel
from harness.tools.watchdog.ending import KEEP_SECONDS, REPORT_SECONDS, in_time, report_failed_run
from harness.tools.watchdog.failures import Place, RunFailure
from harness.tools.watchdog.heartbeat import LAST_BEAT, Heartbeats, open_heartbeat_socket
from harness.tools.watchdog.host_processes import Descendants, ExitWatch, is_stopped
from harness.tools.watchdog.verdict import JobView, RunVerdict

SETTLE_SECONDS = 0.5  # from the watchdog's end to the verdict: another rank may have died together with it
CLEANUP_SECONDS = 2.0  # how long the ranks of a host take, together, to end
POLL_SECONDS = 0.02
FAREWELLS = 5  # last beats, sent several times because UDP may lose one
_SIG_IGN = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LostWatchdog:
    """What a rank knows when its watchdog is gone."""

    pid: int  # of the watchdog
    name: str  # of the watchdog
    host: str
    rank: int
    place: Place
    world_size: int
    heartbeat_timeout: float
    others: Mapping[int, psutil.Process]  # the other ranks of this host, by rank; none before all have met
    met: channel.Met | None
    _exits: dict[int, ExitWatch] = field(default_factory=dict)
    _started: Descendants = field(default_factory=Descendants)  # by the other ranks

    def leave(self) -> None:
        """Do what this rank has to do before it exits, in about CLEANUP_SECONDS.

        torchrun ends all ranks as soon as one has exited, so they wait for each other.
        """
        _ignore_ending_signals()
        noticed = time.monotonic()
        self._exits.update({rank: ExitWatch(process.pid) for rank, process in self.others.items()})
        self._started.look(process.pid for process in self.others.values())
        end_processes(descendants_since(()))
        # Only now, because a full pipe or a dead disk may block from here on.
        said = f"rank {self.rank} FAILED: the watchdog of {self.host} is gone, so this rank exits too\n"
        in_time(lambda: say(said), SETTLE_SECONDS)
        while time.monotonic() < noticed + CLEANUP_SECONDS:
            if self._is_first() and time.monotonic() > noticed + SETTLE_SECONDS:
                self._stand_in(noticed + CLEANUP_SECONDS)
                return
            time.sleep(POLL_SECONDS)

    def _is_first(self) -> bool:
        """Return whether no other rank with a lower number can act."""
        return not any(
            rank < self.rank and is_alive(each) and not is_stopped(each.pid) for rank, each in self.others.items()
        )

    def _stand_in(self, until: float) -> None:
        """Report the failure, and leave nothing of the other ranks: they have the time until `until` to exit."""
        verdict = self._verdict()
        self._tell_other_hosts(verdict.cause)
        ending = f"  reported by rank {self.rank}; terminating the remaining processes"
        in_time(lambda: say_twice("\n".join([*verdict.lines(), ending]) + "\n"), SETTLE_SECONDS)
        while any(map(is_alive, self.others.values())) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        self._started.look(each.pid for each in self.others.values() if is_alive(each))
        self._started.look_for_orphans(self.name)
        left = {each.pid: each for each in self.others.values()} | self._started.known
        left.pop(os.getpid(), None)
        end_processes(left)
        channel.remove_all(self.name)
        scratch.remove_run_folders(self.name)
        answers = in_time(verdict.keep, KEEP_SECONDS)
        if answers and verdict.folder and min([self.rank, *self.others]) == 0:
            folder = verdict.folder
            in_time(lambda: report_failed_run(folder), REPORT_SECONDS + KEEP_SECONDS)

    def _verdict(self) -> RunVerdict:
        with_it = "".join(f", and rank {rank} {how}" for rank, how in sorted(self._ends().items()))
        now, where = clock.now(), {self.rank: self.place}
        failure = RunFailure(
            kind="watchdog",
            time=now,
            host=self.host,
            ranks=(self.rank,),
            place=self.place,
            detail=f"(pid {self.pid}) is gone{with_it}",
        )
        view = JobView(now=now, world_size=self.world_size, places=where, hosts={self.rank: self.host})
        return RunVerdict(self.host, Path(self.met.folder) if self.met else None, [failure], view)

    def _ends(self) -> dict[int, str]:
        """Return what happened to the other ranks: how each ended, or that it is stopped.

        Most wait, as this one does.
        """
        gone = [rank for rank, each in self.others.items() if not is_alive(each)]
        ended = {rank: self._exits[rank].how or "died" for rank in gone}
        stopped = {rank: "is stopped" for rank, each in self.others.items() if is_stopped(each.pid)}
        return ended | stopped

    def _tell_other_hosts(self, failure: RunFailure) -> None:
        if self.met and len(self.met.nodes) > 1:
            key, seconds = bytes.fromhex(self.met.key), self.heartbeat_timeout
            beats = Heartbeats(
                open_heartbeat_socket(), self.met.nodes, self.met.own, key, seconds, clock.now, count=LAST_BEAT
            )
            for _ in range(FAREWELLS):
                beats.beat({self.rank: self.place}, [failure])


def _ignore_ending_signals() -> None:
    """Ignore what torchrun sends when another rank of the host has ended. Python can do so in the main thread only."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        libc.signal(number, _SIG_IGN)
