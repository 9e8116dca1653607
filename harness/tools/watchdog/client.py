"""A rank's observer: it reports phases and failures to the watchdog of its host, and obeys the order to exit.

If the watchdog itself dies, the ranks of its host end by themselves: see without_watchdog.py.
torch is imported only when a run launches, so that the tests' stand-ins for ranks start at once.
"""

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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from harness.observer import Observer, RunContext
from harness.runtime import scratch
from harness.runtime.errors import in_utf8, launcher_pid, say
from harness.runtime.phases import RUN
from harness.tools.watchdog import channel
from harness.tools.watchdog.channel import LONGEST_MESSAGE, WatchdogSettings
from harness.tools.watchdog.failures import ERROR_LENGTH, Node, Place, is_echo, trace_end
from harness.tools.watchdog.heartbeat import open_heartbeat_socket
from harness.tools.watchdog.host_processes import MARK, started_at
from harness.tools.watchdog.stacks import offer_own_stack
from harness.tools.watchdog.without_watchdog import LostWatchdog

if TYPE_CHECKING:  # these import torch
    from harness.cluster.world import Launch
    from harness.config.schema import Config

JOIN_SECONDS = 60.0  # a rank looks for so long for the watchdog that the first rank of its host starts
STOPPED_SECONDS = 60.0  # see WatchdogSettings
ORDER_SECONDS = 15.0  # beyond heartbeat_timeout: a rank that failed waits for so long for the order to exit
FAILED = 1
FLIGHT_RECORDS = "2000"  # collectives that torch's flight recorder keeps
_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchdogAddress:
    """The watchdog of one rank, as the rank knows it; picklable, to be gathered from all ranks."""

    rank: int
    host: str  # name for people
    watchdog: str  # the same for all ranks of one watchdog
    port: int  # for heartbeats; known to the first rank of each host, and 0 on one host
    secret: str = field(repr=False)  # the first rank's secret is the key of the run's heartbeats
    address: str = ""  # of this host, as the other hosts reach it
    pid: int = field(default_factory=os.getpid)  # of the rank


class WatchdogObserver(Observer):
    """Reports a rank's phases and failures. Calls are cheap, thread-safe, and do nothing if there is no watchdog."""

    def __init__(self) -> None:
        self.own: WatchdogAddress
        self._deadline: Callable[[str], float | None] = lambda phase: None
        self._order_seconds = ORDER_SECONDS
        self._run: RunContext | None = None
        self._line: socket.socket | None = None
        self._is_first = False
        """Whether this is the first rank of its torchrun, which starts the watchdog."""
        self._watchdog = 0
        """The pid of the watchdog. The kernel names the process that made the socket, which is the first rank."""
        self._world_size = 0
        self._place = Place()
        self._met: channel.Met | None = None
        self._others: dict[int, psutil.Process] = {}
        """The other ranks of this torchrun, once all have met."""
        self._finished = False
        self._answered = threading.Event()
        self._lock = threading.Lock()

    def launched(self, config: "Config", launch: "Launch") -> None:
        """Connect to the watchdog. The run's temporary folder on this host has the same name."""
        import torch

        from harness.cluster.placement import host_name
        from harness.cluster.world import host_identity

        limits = config.run
        settings = WatchdogSettings(
            host=host_name(host_identity()),
            world_size=launch.world_size,
            local_world_size=launch.local_world_size,
            idle_seconds=limits.timeout_seconds,
            heartbeat_timeout=limits.heartbeat_timeout,
            stopped_seconds=STOPPED_SECONDS,
        )
        timeouts, otherwise = limits.phase_timeouts, limits.timeout_seconds
        self.connect(launch.rank, launch.local_rank, lambda phase: deadline(phase, timeouts, otherwise), settings)
        scratch.enter_run_folder(self.own.watchdog)  # which the watchdog removes
        # Before any communicator; since 2.8 torch warns of the older name, on every rank.
        is_new = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE" if is_new else "TORCH_NCCL_TRACE_BUFFER_SIZE", FLIGHT_RECORDS)

    def met(self, run: RunContext) -> None:
        """Let the watchdogs of all hosts find each other. A collective call of all ranks."""
        from harness.cluster.network import own_address
        from harness.cluster.world import all_gather

        self._run = run
        self.meet(all_gather(replace(self.own, address=own_address(os.environ))), run.folder)

    def connect(
        self, rank: int, local_rank: int, deadline: Callable[[str], float | None], settings: WatchdogSettings
    ) -> None:
        """Connect to the watchdog; the first rank of a torchrun starts it.

        deadline: seconds that a phase may take, None for no limit.
        """
        self._deadline, self._order_seconds = deadline, settings.heartbeat_timeout + ORDER_SECONDS
        pid, host, is_torchrun = launcher_pid(), settings.host, "TORCHELASTIC_RUN_ID" in os.environ
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        # Containers with pids of their own may share the folder for temporary files.
        pids = os.stat("/proc/self/ns/pid").st_ino
        name = f"harness-{os.getuid()}-{pids}-{pid}-{started_at(pid)}-{restart}"
        settings = replace(settings, name=name, launcher=pid, is_torchrun=is_torchrun)
        self._is_first, self._world_size = local_rank == 0, settings.world_size
        port = _start_watchdog(settings) if self._is_first else 0
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
        threading.Thread(target=self._obey, args=[line], name="watchdog-client", daemon=True).start()

    def meet(self, addresses: Sequence[WatchdogAddress], folder: Path) -> None:
        """Let the watchdogs listen to each other, and wait for their first beats. addresses: of all ranks.

        folder: the run directory, where the watchdog keeps its verdict.
        """
        by_watchdog: dict[tuple[str, str], list[WatchdogAddress]] = {}
        for each in addresses:
            by_watchdog.setdefault((each.host, each.watchdog), []).append(each)
        nodes = tuple(
            Node(host=host, ranks=tuple(e.rank for e in some), address=some[0].address, port=max(e.port for e in some))
            for (host, _), some in by_watchdog.items()
        )
        own = list(by_watchdog).index((self.own.host, self.own.watchdog))
        for each in by_watchdog[self.own.host, self.own.watchdog]:
            with suppress(psutil.NoSuchProcess):  # it has just ended
                if each.rank != self.own.rank:
                    self._others[each.rank] = psutil.Process(each.pid)
        self._met = channel.Met(nodes, own, addresses[0].secret, str(folder))
        self._ask(self._met)

    def flush(self) -> None:
        """Return once the watchdogs of the other hosts know this rank's phase."""
        self._ask(channel.Flush())

    def phase_begins(self, phase: str, step: int | None = None) -> None:
        if phase != RUN:
            self._place = Place(0, phase, step, inside=True)
        self._send(channel.PhaseBegins(phase, step, self._deadline(phase)))

    def phase_ends(self, phase: str, step: int | None = None) -> None:
        if phase != RUN:
            self._place = Place(0, phase, step, inside=False)
        self._send(channel.PhaseEnds(phase))

    def phase_fails(self, phase: str, step: int | None = None) -> None:
        self._send(channel.PhaseFails(phase))

    def interrupted(self, signal_name: str) -> None:
        self._send(channel.Failed("told", f"got {signal_name}, as from Ctrl-C or a job scheduler,"))

    def failed(self, error: str, traceback: str = "") -> None:
        """Report the error that is about to end this rank, and wait for the order to exit.

        Return if there is no watchdog, or no order in time.
        """
        line, traceback = " ".join(in_utf8(error).split()), in_utf8(traceback)
        echo = self._line is not None and is_echo(line, self.own.rank)
        if self._send(channel.Failed("echo" if echo else "exception", line[:ERROR_LENGTH], trace_end(traceback))):
            time.sleep(self._order_seconds)

    def finished(self, code: int) -> None:
        """Report that this rank is about to exit on its own, with this code."""
        self._send(channel.Exits(code))
        self._finished = True

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
                if "watchdog" in order:
                    self._watchdog = order["watchdog"]
                if "done" in order:
                    self._answered.set()
                elif "dump" in order and self._run and self._run.world.device.type == "cuda":
                    dump_flight_records(self._run.folder, self._run.world.rank)
        if self._finished:
            return
        if code is None:
            self._leave_without_watchdog()
        if self._run:
            with suppress(OSError):  # a full disk, which may be the failure
                self._run.events.close()
        os._exit(FAILED if code is None else code)

    def _leave_without_watchdog(self) -> None:
        LostWatchdog(
            pid=self._watchdog,
            name=self.own.watchdog,
            host=self.own.host,
            rank=self.own.rank,
            place=self._place,
            world_size=self._world_size,
            heartbeat_timeout=self._order_seconds - ORDER_SECONDS,
            others=self._others,
            met=self._met,
        ).leave()


def deadline(phase: str, phase_timeouts: dict[str, float], otherwise: float) -> float | None:
    """Seconds that a phase may take; None for no limit, which is what the whole job has unless it is given one."""
    return phase_timeouts.get(phase, None if phase == RUN else otherwise)


def dump_flight_records(folder: Path, rank: int) -> None:
    """Write NCCL's last collectives on this rank, as torch keeps them: read by torch's `torchfrtrace`."""
    import torch

    dump: Any = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)  # only in a torch built with NCCL
    if dump:
        with suppress(OSError):  # a full disk
            (folder / f"flight-record-rank{rank}.pickle").write_bytes(dump())


def _start_watchdog(settings: WatchdogSettings) -> int:
    """Start the watchdog with its sockets; return the port for heartbeats, 0 on one host."""
    listener, folder = channel.listen(settings.name)
    hosts = [open_heartbeat_socket()] if settings.world_size > settings.local_world_size else []
    passed = [each.fileno() for each in (listener, *hosts)]
    port = int(hosts[0].getsockname()[1]) if hosts else 0
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [json.dumps(asdict(settings)), str(folder), *map(str, passed)]
    subprocess.run(
        # The shell detaches it at once: a child of this rank would be ended together with the rank's other children.
        ["/bin/sh", "-c", '"$@" &', "sh", sys.executable, "-P", "-m", "harness.tools.watchdog.watchdog", *words],
        env=os.environ | {"PYTHONPATH": path},
        pass_fds=passed,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        check=True,
    )
    for each in (listener, *hosts):
        each.close()
    return port
