"""Hosts from start to end: their processes, the wire, harms when their time has come, and one end for all."""

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness.runtime.errors import MISTAKE
from harness.tools.hosts import janitor, kernel
from harness.tools.hosts.console import Console, Lines, RootCause
from harness.tools.hosts.harms import AfterSeconds, AtPhase, Harm
from harness.tools.hosts.host import END, GO, KILL, MESSAGE_BYTES, end_descendants
from harness.tools.hosts.phase_server import Door
from harness.tools.hosts.plan import MASTER_PORT, HostPlan, Plan, environment, host_spec, hosts_file, torchrun
from harness.tools.hosts.skew import skewed
from harness.tools.hosts.wire import WireSpec

REPOSITORY = Path(__file__).resolve().parents[3]
POLL_SECONDS = 0.2
END_SECONDS = 20.0
"""From SIGTERM to torchrun until whatever is left of a host is killed."""
READ_BYTES = 1 << 16


CommandLine = Callable[[Plan, HostPlan, str, int], tuple[str, ...]]
"""What one host runs, given Python's path and a port that is free on host0."""


class StartError(RuntimeError):
    """A host or the wire did not come up; what it printed says why."""


@dataclass(slots=True)
class Host:
    """A host that runs."""

    plan: HostPlan
    process: subprocess.Popen[bytes]
    control: socket.socket
    lines: Lines
    cause: RootCause
    init: int = 0
    """Number of the process with which all of the host's end."""
    code: int | None = None
    """torchrun's exit code, or that of what ended it."""
    left: list[str] = field(default_factory=list)
    killed: bool = False
    """On purpose."""
    ended_by_us: bool = False

    @property
    def name(self) -> str:
        """host0, host1, ..."""
        return self.plan.name


class Session:
    """One use of launch/hosts.py, from the main thread: hosts die with the thread that started them."""

    def __init__(self, plan: Plan, command: CommandLine = torchrun) -> None:
        self.plan = plan
        self.command = command
        self.console = Console(width=len(plan.hosts[-1].name))
        self.hosts: dict[str, Host] = {}
        self.order: list[Host] = []
        """Hosts that have ended, in that order."""
        self.waiting = list(plan.harms)
        self.too_late: list[Harm] = []
        self.phases: dict[str, set[str]] = {host.name: set() for host in plan.hosts}
        self.signals: list[int] = []
        self._folder = Path()
        self._selector = selectors.DefaultSelector()
        self._wire: subprocess.Popen[bytes] | None = None
        self._wire_control: socket.socket | None = None
        self._end_all_at: float | None = None
        self._kill_all_at: float | None = None

    def run(self) -> int:
        """Start all, wait for all, leave nothing; returns the exit code. Raises StartError."""
        kernel.adopt_orphans()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda number, frame: self.signals.append(number))
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        cleaner = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(janitor.__file__)), str(self._folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._start()
            while any(host.code is None for host in self.hosts.values()):
                self._turn()
            return self._exit_code()
        finally:
            self._end(spare=cleaner.pid)
            shutil.rmtree(self._folder, ignore_errors=True)  # what this leaves, the janitor takes
            cleaner.communicate()

    def _start(self) -> None:
        port = MASTER_PORT if self.plan.namespaces else _free_port(self.plan.hosts[0].addresses[0])
        for plan in self.plan.hosts:
            self._start_host(plan, port)
        descriptors = {name: self._meet(host) for name, host in self.hosts.items()}
        if self.plan.namespaces:
            self._start_wire(descriptors)
        for host in self.hosts.values():
            self._selector.register(host.control, selectors.EVENT_READ, lambda host=host: self._hear(host))
            host.control.send(GO)
        self.console.started = time.monotonic()
        self.console.say(self._introduction())

    def _start_host(self, plan: HostPlan, port: int) -> None:
        folder = self._folder / plan.name
        (folder / "tmp").mkdir(parents=True)
        (folder / "hosts").write_text(hosts_file(self.plan, plan), encoding="ascii")
        changes = environment(self.plan, plan, folder, os.environ)
        if plan.skew_seconds:
            changes |= skewed(plan.skew_seconds, os.environ)
        command = self.command(self.plan, plan, sys.executable, port)
        spec = host_spec(self.plan, plan, folder, Path.cwd(), str(uuid.uuid4()), command, changes)
        (folder / "boot_id").write_text(spec.boot_id + "\n", encoding="ascii")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.tools.hosts.host", str(theirs.fileno()), str(os.getpid())],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C is the launcher's, which ends the hosts in order
        )
        theirs.close()
        ours.send(spec.to_json())
        cause = RootCause()

        def tell(line: str) -> None:
            cause.read(line)
            self.console.line(plan.name, plan.index, line)

        host = self.hosts[plan.name] = Host(plan, process, ours, Lines(tell), cause)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, lambda: self._read(host))
        if self.plan.knocks:
            Door(folder / "phase_client", self._selector, lambda phase, step: self._phase(host, phase, step))

    def _meet(self, host: Host) -> list[int]:
        """Wait until the host is there; returns its interfaces' descriptors."""
        descriptors: list[int] = []
        networked = not self.plan.namespaces
        while not (networked and host.init):
            message, received, _, _ = socket.recv_fds(host.control, MESSAGE_BYTES, 8)
            if not message:
                host.process.wait()
                self._read(host)
                raise StartError(f"{host.name} did not come up.")
            if message == b"network":
                networked, descriptors = True, received
            else:
                host.init = json.loads(message)["init"]
        return descriptors

    def _start_wire(self, descriptors: dict[str, list[int]]) -> None:
        spec = WireSpec(
            self.plan.conditions,
            {host.name: host.addresses for host in self.plan.hosts},
            {name: tuple(own) for name, own in descriptors.items()},
        )
        self._wire_control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        everything = [descriptor for own in descriptors.values() for descriptor in own]
        self._wire = subprocess.Popen(
            [sys.executable, "-m", "harness.tools.hosts.wire", str(theirs.fileno()), spec.to_json()],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *everything),
            start_new_session=True,
        )
        theirs.close()
        for descriptor in everything:
            os.close(descriptor)

    def _introduction(self) -> str:
        how = "in namespaces" if self.plan.namespaces else "as processes, on loopback"
        where = ", ".join(f"{host.name} {' '.join(host.addresses)}" for host in self.plan.hosts)
        return f"{len(self.plan.hosts)} hosts of {self.plan.ranks_per_host} ranks {how}: {where}"

    def _turn(self) -> None:
        """Wait for something to happen, a moment at most, and answer it."""
        for key, _ in self._selector.select(POLL_SECONDS):
            react: Callable[[], None] = key.data
            react()
        now = time.monotonic()
        for harm in list(self.waiting):
            if isinstance(harm.when, AfterSeconds) and now - self.console.started >= harm.when.seconds:
                self._do(harm, f"{harm.when}")
        for host in self.hosts.values():
            if host.code is None and host.process.poll() is not None:
                self._ended(host, host.process.returncode)
        if self._wire and self._wire.poll() is not None and not self._kill_all_at:
            self.console.say(f"the wire between the hosts ended with exit code {self._wire.returncode}; all hosts end")
            self._end_all_at = now
        if self.signals and (self._end_all_at is None or self._end_all_at > now):
            self.console.say(f"{signal.Signals(self.signals[0]).name}: all hosts end")
            self._end_all_at = now
        if self._end_all_at is not None and now >= self._end_all_at and self._kill_all_at is None:
            self._kill_all_at = now + END_SECONDS
            for host in self._running():
                host.ended_by_us = True
                _tell(host, END)
        if self._kill_all_at is not None and (now >= self._kill_all_at or len(self.signals) > 1):
            for host in self._running():
                self._power_off(host)

    def _running(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.code is None and host.process.poll() is None]

    def _read(self, host: Host) -> None:
        """Pass on what the host printed."""
        assert host.process.stdout is not None
        if host.process.stdout.closed:
            return
        while True:
            try:
                data = os.read(host.process.stdout.fileno(), READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                host.lines.end()
                self._selector.unregister(host.process.stdout)
                host.process.stdout.close()
                return
            host.lines.feed(data)

    def _hear(self, host: Host) -> None:
        """How the host's torchrun ended, or that the host is gone."""
        message = host.control.recv(MESSAGE_BYTES)
        if not message:
            self._selector.unregister(host.control)
            return
        host.left = json.loads(message)["left"]

    def _ended(self, host: Host, code: int) -> None:
        self._read(host)
        host.lines.end()
        host.code = code if code >= 0 else 128 - code
        self.order.append(host)
        if host.left:
            self.console.say(f"{host.name}: outlived torchrun and were ended: {', '.join(host.left)}")
        running = [other.name for other in self.hosts.values() if other.code is None]
        if host.killed:
            self.console.say(f"{host.name} is gone, killed on purpose")
        elif host.ended_by_us:
            self.console.say(f"{host.name} was ended")
        elif not host.code:
            self.console.say(f"{host.name}: torchrun ended with exit code 0")
        else:
            self.console.say(f"{host.name}: torchrun FAILED with exit code {host.code}")
        if host.code and running and self._end_all_at is None:
            patience = self.plan.options.patience
            self._end_all_at = time.monotonic() + patience
            self.console.say(f"{', '.join(running)}: {patience:g} s left to end")

    def _phase(self, host: Host, phase: str, step: int | None) -> None:
        """A rank of the host begins a phase; on return it may."""
        self.phases[host.name].add(phase)
        for harm in list(self.waiting):
            if harm.host == host.name and isinstance(harm.when, AtPhase) and harm.when.matches(phase, step):
                self._do(harm, f"at {phase}" + ("" if step is None else f" of step {step}"))

    def _do(self, harm: Harm, when: str) -> None:
        self.waiting.remove(harm)
        host = self.hosts[harm.host]
        if host.code is not None:
            self.console.say(f"{harm} has come too late: {host.name} has ended")
            self.too_late.append(harm)
        elif harm.kind == "cut":
            self._cut(host)
            self.console.say(f"cut {host.name} from the others {when}")
        else:
            host.killed = True
            if self._wire_control:
                self._cut(host)  # no power, no packet: the kernel would tell every peer that the connection is closed
            self._power_off(host)
            self.console.say(f"killed {host.name} {when}")

    def _cut(self, host: Host) -> None:
        assert self._wire_control is not None
        self._wire_control.send(json.dumps({"cut": host.name}).encode())
        if self._wire_control.recv(MESSAGE_BYTES) != b"done":
            raise StartError("the wire between the hosts is gone.")

    def _power_off(self, host: Host) -> None:
        """All of its processes, at once. Returns when they are gone."""
        if not host.init:
            host.process.kill()  # it has not come up; what it started dies with it
        elif self.plan.namespaces:
            with contextlib.suppress(ProcessLookupError):  # it ended this moment
                os.kill(host.init, signal.SIGKILL)
        else:
            _tell(host, KILL)
        host.process.wait()

    def _end(self, spare: int) -> None:
        """Whatever happened, nothing stays."""
        for host in self._running():
            self._power_off(host)
        for host in self.hosts.values():
            host.control.close()
        if self._wire and self._wire_control:
            self._wire_control.close()
            self._wire.wait()
        end_descendants(spare=spare)  # of hosts without namespaces whose own process was killed by others

    def _exit_code(self) -> int:
        """What the rank that failed first answered, where torchrun said it."""
        if self.signals:
            return 128 + self.signals[0]
        if self._wire and self._wire.poll() is not None:
            return 1  # it serves until it is told to end, which is after this
        if any(host.code for host in self.order):
            known = [host.cause.code for host in self.order if not host.killed and (host.cause.code or 0) > 0]
            return next((code for code in known if code and code > 1), 1)
        for harm in self.waiting:
            seen = ", ".join(sorted(self.phases[harm.host])) or "none"
            why = f"phases that {harm.host} began: {seen}" if isinstance(harm.when, AtPhase) else "all hosts had ended"
            self.console.say(f"{harm} never happened; {why}")
        return MISTAKE if self.waiting or self.too_late else 0


def _tell(host: Host, message: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # it ended this moment
        host.control.send(message)


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
