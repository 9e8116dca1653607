"""A rank's observer: it reports phases and failures to the watchdog of its host, and obeys the order to exit.

If the watchdog itself dies, the ranks of its host end by themselves.
torch is imported only when a run launches, so that the tests' stand-ins for ranks start at once.
"""

import json
import math
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import psutil

from harness.observer import Observer, RunContext
from harness.runtime.errors import hold_launcher, in_utf8, launcher_pid, say, say_twice
from harness.runtime.events import RUN
from harness.runtime.files import enter_run_folder, remove_run_folders
from harness.runtime.processes import end_processes, in_background
from harness.tools.run_tree import SharedFiles
from harness.tools.watchdog import channel
from harness.tools.watchdog.channel import LONGEST_MESSAGE, WatchdogSettings, open_heartbeat_socket
from harness.tools.watchdog.ending import MARK, started_at
from harness.tools.watchdog.failures import ERROR_LENGTH, Node, Place, is_echo, trace_end
from harness.tools.watchdog.verdict import offer_own_stack

if TYPE_CHECKING:  # these import torch
    from harness.cluster.world import Launch
    from harness.config.schema import Config

JOIN_SECONDS = 60.0  # a rank looks for so long for the watchdog that the first rank of its host starts
STOPPED_SECONDS = 60.0  # see WatchdogSettings
ORDER_SECONDS = 15.0  # beyond heartbeat_timeout: a rank that failed waits for so long for the order to exit
FAILED = 1
LEAVE_SECONDS = 1.0  # in which the ranks of a host whose watchdog is gone end what they have started
FLIGHT_RECORDS = "2000"  # collectives that torch's flight recorder keeps
_ROOT = Path(__file__).parents[3]  # not resolved: harness may be here by a link, away from other packages


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchdogAddress:
    """The watchdog of one rank, as the rank knows it; picklable, to be gathered from all ranks."""

    rank: int
    host: str  # name for people
    watchdog: str  # the same for all ranks of one watchdog
    port: int  # for heartbeats; known to the first rank of each host, and 0 on one host
    secret: str = field(repr=False)  # the first rank's secret is the key of the run's heartbeats
    address: str = ""  # of this host, as the other hosts reach it


class OpenPhase(NamedTuple):
    """A phase that has begun, and has not ended."""

    name: str
    step: int | None
    limit: float  # seconds
    due: float  # when that has passed, by time.monotonic()


@dataclass(slots=True)
class OpenPhases:
    """The phases that a rank is in, their time limits, and how far it has come."""

    timeouts: Mapping[str, float]  # phase -> seconds that it may take
    otherwise: float  # the limit of other phases, and of the time between two; the whole job has none by itself
    place: Place = field(default_factory=Place)
    _open: list[OpenPhase] = field(default_factory=list)

    def begin(self, phase: str, step: int | None) -> None:
        limit = self.timeouts.get(phase, math.inf if phase == RUN else self.otherwise)
        self._open.append(OpenPhase(phase, step, limit, time.monotonic() + limit))
        self._go_on(phase, step)

    def end(self, phase: str) -> None:
        if ended := self.close(phase):
            self._go_on(ended.name, ended.step)

    def close(self, phase: str) -> OpenPhase | None:
        """Return the phase of this name that began last, which is not open any more.

        If an exception has left it and nobody catches that, it is still the place of the failure.
        """
        found = next((each for each in reversed(self._open) if each.name == phase), None)
        if found:
            self._open.remove(found)
        return found

    def due(self) -> tuple[float | None, float]:
        """Return when the limit that passes first will have passed, None for never, and its length in seconds."""
        limits = [(each.due, each.limit) for each in self._open]
        if not self._open or self._open[-1].name == RUN:  # between two phases
            limits.append((time.monotonic() + self.otherwise, self.otherwise))
        due, limit = min(limits)
        return (due, limit) if due < math.inf else (None, 0.0)

    def _go_on(self, phase: str, step: int | None) -> None:
        """Note the innermost phase that is open; if there is none, the one that has just ended stays the place."""
        inside = [each for each in self._open if each.name != RUN]
        if inside:
            phase, step = inside[-1].name, inside[-1].step
        elif phase == RUN:
            phase, step = self.place.phase, self.place.step
        self.place = Place(self.place.progress + 1, phase, step, bool(inside))


class WatchdogObserver(Observer):
    """Reports a rank's phases and failures. Calls are cheap, thread-safe, and do nothing if there is no watchdog."""

    def __init__(self) -> None:
        self.own: WatchdogAddress
        self._settings: WatchdogSettings
        self._phases = OpenPhases({}, math.inf)
        self._run: RunContext | None = None
        self._line: socket.socket | None = None
        self._is_first = False
        """Whether it is the first rank of its torchrun."""
        self._finished = False
        self._answered = threading.Event()
        self._lock = threading.RLock()

    def launched(self, config: "Config", launch: "Launch") -> None:
        """Connect to the watchdog. The run's temporary folder on this host has the same name."""
        from harness.cluster.placement import host_name
        from harness.cluster.world import host_identity

        limits = config.run
        settings = WatchdogSettings(
            host=host_name(host_identity()),
            world_size=launch.world_size,
            local_world_size=launch.local_world_size,
            heartbeat_timeout=limits.heartbeat_timeout,
            stopped_seconds=STOPPED_SECONDS,
        )
        self.connect(
            launch.rank, launch.local_rank, OpenPhases(limits.phase_timeouts, limits.timeout_seconds), settings
        )
        enter_run_folder(self.own.watchdog)  # which the watchdog removes
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", FLIGHT_RECORDS)  # before any communicator

    def met(self, run: RunContext) -> None:
        """Let the watchdogs of all hosts find each other. A collective call of all ranks."""
        from harness.cluster.network import own_address
        from harness.cluster.world import all_gather

        self._run = run
        addresses = all_gather(replace(self.own, address=own_address(os.environ)))
        self.meet(addresses, run.folder, run.world.launcher)

    def connect(self, rank: int, local_rank: int, phases: OpenPhases, settings: WatchdogSettings) -> None:
        """Connect to the watchdog; the first rank of a torchrun starts it."""
        pid, host, is_torchrun = launcher_pid(), settings.host, "TORCHELASTIC_RUN_ID" in os.environ
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        # Containers with pids of their own may share the folder for temporary files.
        pids = os.stat("/proc/self/ns/pid").st_ino
        name = f"harness-{os.getuid()}-{pids}-{pid}-{started_at(pid)}-{restart}"
        self._phases, self._is_first = phases, local_rank == 0
        self._settings = replace(settings, name=name, launcher=pid, is_torchrun=is_torchrun)
        port = _start_watchdog(self._settings) if local_rank == 0 else 0
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
        self._tell_place()
        threading.Thread(target=self._obey, args=[line], name="watchdog-client", daemon=True).start()

    def meet(self, addresses: Sequence[WatchdogAddress], folder: Path, launcher: str) -> None:
        """Let the watchdogs listen to each other, and wait for their first beats. addresses: of all ranks.

        A rank that went on before its watchdog has seen it could end without a trace of how.

        folder: the run directory, where the watchdog keeps its verdict. launcher: its name there.
        """
        by_watchdog: dict[tuple[str, str], list[WatchdogAddress]] = {}
        for each in addresses:
            by_watchdog.setdefault((each.host, each.watchdog), []).append(each)
        nodes = tuple(
            Node(host=host, ranks=tuple(e.rank for e in some), address=some[0].address, port=max(e.port for e in some))
            for (host, _), some in by_watchdog.items()
        )
        own = list(by_watchdog).index((self.own.host, self.own.watchdog))
        self._ask(channel.Met(nodes, own, addresses[0].secret, str(folder), launcher))

    def flush(self) -> None:
        """Return once the watchdogs of the other hosts have been sent this rank's phase."""
        self._ask(channel.Flush())

    def phase_begins(self, phase: str, step: int | None = None) -> None:
        with self._lock:
            self._phases.begin(phase, step)
            self._tell_place(begins=True)

    def phase_ends(self, phase: str, step: int | None = None) -> None:
        with self._lock:
            self._phases.end(phase)
            self._tell_place()

    def phase_fails(self, phase: str, step: int | None = None) -> None:
        with self._lock:
            self._phases.close(phase)
            self._tell_place()

    def interrupted(self, signal_name: str) -> None:
        self._send(channel.Failed("told", f"got {signal_name}, as from Ctrl-C or a job scheduler,"))

    def failed(self, error: str, traceback: str = "") -> None:
        """Report the error that is about to end this rank, and wait for the order to exit.

        Return if there is no watchdog, or no order in time.
        """
        line, traceback = " ".join(in_utf8(error).split()), in_utf8(traceback)
        echo = self._line is not None and is_echo(line, self.own.rank)
        if self._send(channel.Failed("echo" if echo else "exception", line[:ERROR_LENGTH], trace_end(traceback))):
            time.sleep(self._settings.heartbeat_timeout + ORDER_SECONDS)

    def finished(self, code: int) -> None:
        """Report that this rank is about to exit on its own, with this code."""
        self._send(channel.Exits(code))
        self._finished = True

    def _tell_place(self, begins: bool = False) -> None:
        self._send(channel.Moved(self._phases.place, begins, *self._phases.due()))

    def _ask(self, message: channel.Message) -> None:
        """Send it, and wait until the watchdog has done what it asks for."""
        self._answered.clear()
        if self._send(message):
            self._answered.wait(JOIN_SECONDS)

    def _send(self, message: channel.Message) -> bool:
        """Return whether there is a watchdog to send it to."""
        if self._line is None or self._finished:
            return False
        # On an OSError the watchdog has gone, which _obey is about to see.
        with suppress(OSError), self._lock:
            self._line.send(msgspec.json.encode(message))
        return True

    def _obey(self, line: socket.socket) -> None:
        """Wait on a thread for the order to exit, as the main thread may be stuck in a collective."""
        code = None
        with suppress(OSError):
            while code is None and (data := line.recv(LONGEST_MESSAGE)):
                order = json.loads(data)
                code = order.get("leave")
                if "done" in order:
                    self._answered.set()
                elif "dump" in order and self._run and self._run.world.device.type == "cuda":
                    dump_flight_records(self._run.folder, self._run.world.rank)
        if self._finished:
            return
        if code is None:
            self._end_without_watchdog()
        if self._run:
            with suppress(OSError):  # a full disk, which may be the failure
                self._run.events.close()
        os._exit(FAILED if code is None else code)

    def _end_without_watchdog(self) -> None:
        """Say that the watchdog is gone, since nothing else would notice now that the run hangs, and end what this rank
        has started. torchrun ends all ranks as soon as one has exited, so each gives the others the time to do the same.
        """
        until, place, host = time.monotonic() + LEAVE_SECONDS, self._phases.place, self.own.host
        started = {each.pid: each for each in psutil.Process().children(recursive=True)}
        shared = SharedFiles()
        shared.look([os.getpid(), *started])
        end_processes(started)
        shared.remove()
        said = f"FAILED: the watchdog of {host} is gone, so rank {self.own.rank} ends too, {place}\n"
        in_background(lambda: say_twice(said) if self._is_first else say(said), "say")  # a screen may block
        remove_run_folders(self._settings.name)
        time.sleep(max(0.0, until - time.monotonic()))


def dump_flight_records(folder: Path, rank: int) -> None:
    """Write NCCL's last collectives on this rank, as torch keeps them: read by torch's `torchfrtrace`."""
    import torch

    dump: Any = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)  # only in a torch built with NCCL
    if dump:
        with suppress(OSError):  # a full disk
            (folder / f"flight-record-rank{rank}.pickle").write_bytes(dump())


def _start_watchdog(settings: WatchdogSettings) -> int:
    """Start the watchdog with its sockets; return the port for heartbeats, 0 on one host."""
    listener = channel.listen(settings.name)
    hosts = [open_heartbeat_socket()] if settings.world_size > settings.local_world_size else []
    passed = [each.fileno() for each in (listener, *hosts)]
    holds = hold_launcher()
    port = int(hosts[0].getsockname()[1]) if hosts else 0
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [json.dumps(asdict(replace(settings, holds=holds))), *map(str, passed)]
    subprocess.run(
        # The shell detaches it at once: a child of this rank would be ended together with the rank's other children.
        ["/bin/sh", "-c", '"$@" &', "sh", sys.executable, "-P", "-m", "harness.tools.watchdog.watchdog", *words],
        env=os.environ | {"PYTHONPATH": path},
        pass_fds=[*passed, *([] if holds is None else [holds])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        check=True,
    )
    for each in (listener, *hosts):
        each.close()
    if holds is not None:
        os.close(holds)
    return port
