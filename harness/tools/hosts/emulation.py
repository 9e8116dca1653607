"""Hosts from start to end: their processes, the router, faults when their time has come, and one end for all."""

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
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from harness.runtime.errors import MISTAKE
from harness.tools.hosts import cleanup, kernel
from harness.tools.hosts.host import END, GO, KILL, MESSAGE_BYTES, HostSpec, end_descendants, exit_code
from harness.tools.hosts.host_faults import HostFault, at, skewed_clock
from harness.tools.hosts.host_output import HostConsole, RootCause
from harness.tools.hosts.host_plan import MASTER_PORT, EmulationPlan, HostPlan, environment, hosts_file, torchrun
from harness.tools.hosts.phase_gate import PhaseServer
from harness.tools.hosts.router import Router

REPOSITORY = Path(__file__).resolve().parents[3]
POLL_SECONDS = 0.2
END_SECONDS = 20.0
"""From SIGTERM to torchrun until what is left of a host is killed."""
PRINT_SECONDS = 5.0
"""How long the last lines of a host may take to print."""

CommandLine = Callable[[EmulationPlan, HostPlan, str, int], tuple[str, ...]]
"""What one host runs, given Python's path and a port that is free on host0."""


class StartError(RuntimeError):
    """A host or the router did not come up; its output says why."""


@dataclass(slots=True)
class RunningHost:
    """A host, from its start to its end."""

    plan: HostPlan
    process: subprocess.Popen[bytes]
    control: socket.socket
    cause: RootCause = field(default_factory=RootCause)
    printer: threading.Thread = field(default_factory=threading.Thread)
    init: int = 0
    """Pid of the process with which all of the host's end."""
    code: int | None = None
    """torchrun's exit code, or that of what ended it."""
    killed: bool = False
    """On purpose."""
    ended_by_us: bool = False

    @property
    def name(self) -> str:
        """host0, host1, ..."""
        return self.plan.name

    def tell(self, message: bytes) -> None:
        """Send a message to the host's process, unless it has just ended."""
        with contextlib.suppress(BrokenPipeError):
            self.control.send(message)


class Emulation:
    """One use of launch/hosts.py, from the main thread: hosts die with the thread that started them."""

    def __init__(self, plan: EmulationPlan, command: CommandLine = torchrun) -> None:
        self.plan = plan
        self.command = command
        self.console = HostConsole(width=len(plan.hosts[-1].name))
        self.hosts: dict[str, RunningHost] = {}
        self.ended: list[RunningHost] = []
        self.waiting = list(plan.faults)
        self.phases: dict[str, set[str]] = {host.name: set() for host in plan.hosts}
        self.signals: list[int] = []
        self._folder = Path()
        self._selector = selectors.DefaultSelector()
        self._router: subprocess.Popen[bytes] | None = None
        self._router_control: socket.socket | None = None
        self._reader_gone: BrokenPipeError | None = None
        self._end_all_at: float | None = None
        self._kill_all_at: float | None = None

    def run(self) -> int:
        """Start all, wait for all, leave nothing; return the exit code. Raise StartError."""
        kernel.adopt_orphans()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda number, frame: self.signals.append(number))
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        cleaner = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(cleanup.__file__)), str(self._folder)],
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
            shutil.rmtree(self._folder, ignore_errors=True)  # what this leaves, the cleaner takes
            cleaner.communicate()

    def _start(self) -> None:
        port = MASTER_PORT if self.plan.namespaces else _free_port(self.plan.hosts[0].addresses[0])
        for plan in self.plan.hosts:
            self._start_host(plan, port)
        descriptors = {name: self._meet(host) for name, host in self.hosts.items()}
        if self.plan.namespaces:
            self._start_router(descriptors)
        for host in self.hosts.values():
            host.control.send(GO)
        self.console.started = time.monotonic()
        how = "in namespaces" if self.plan.namespaces else "as processes, on loopback"
        where = ", ".join(f"{host.name} {' '.join(host.addresses)}" for host in self.plan.hosts)
        self.console.say(f"{len(self.plan.hosts)} hosts of {self.plan.ranks_per_host} ranks {how}: {where}")

    def _start_host(self, plan: HostPlan, port: int) -> None:
        folder = self._folder / plan.name
        (folder / "tmp").mkdir(parents=True)
        (folder / "hosts").write_text(hosts_file(self.plan, plan), encoding="ascii")
        (folder / "boot_id").write_text(f"{uuid.uuid4()}\n", encoding="ascii")
        changes = environment(self.plan, plan, folder, os.environ)
        if plan.skew_seconds:
            changes |= skewed_clock(plan.skew_seconds, os.environ)
        spec = HostSpec(
            name=plan.name,
            namespaces=self.plan.namespaces,
            interfaces=plan.interfaces,
            mtu=self.plan.options.mtu,
            ipv6=self.plan.network != "ipv4",
            folder=str(folder),
            command=self.command(self.plan, plan, sys.executable, port),
            environment=changes,
            working_folder=str(Path.cwd()),
        )
        process, control = _start_process("host", str(os.getpid()), output=subprocess.PIPE)
        control.send(msgspec.json.encode(spec))
        host = self.hosts[plan.name] = RunningHost(plan, process, control)
        host.printer = threading.Thread(target=self._print_output, args=(host,), daemon=True)
        host.printer.start()
        if self.plan.reports_phases:
            PhaseServer(folder / "phases", self._selector, lambda phase, step: self._phase(host, phase, step))

    def _meet(self, host: RunningHost) -> list[int]:
        """Wait until the host is up; return its interfaces' descriptors."""
        descriptors: list[int] = []
        networked = not self.plan.namespaces
        while not (networked and host.init):
            message, received, _, _ = socket.recv_fds(host.control, MESSAGE_BYTES, 8)
            if not message:
                host.process.wait()
                host.printer.join(PRINT_SECONDS)
                raise StartError(f"{host.name} did not come up.")
            if message == b"network":
                networked, descriptors = True, received
            else:
                host.init = json.loads(message)["init"]
        return descriptors

    def _start_router(self, descriptors: dict[str, list[int]]) -> None:
        router = Router(
            conditions=self.plan.conditions,
            addresses={host.name: host.addresses for host in self.plan.hosts},
            ports={name: tuple(own) for name, own in descriptors.items()},
        )
        everything = [descriptor for own in descriptors.values() for descriptor in own]
        self._router, self._router_control = _start_process("router", msgspec.json.encode(router).decode(), everything)
        for descriptor in everything:
            os.close(descriptor)

    def _turn(self) -> None:
        """Wait for something to happen, a moment at most, and react."""
        if self._reader_gone:
            raise self._reader_gone
        for key, _ in self._selector.select(POLL_SECONDS):
            react: Callable[[], None] = key.data
            react()
        now = time.monotonic()
        for fault in list(self.waiting):
            due = not fault.phase and now - self.console.started >= fault.seconds
            if due and self.hosts[fault.host].code is None:
                self._do(fault, fault.when)
        for host in self.hosts.values():
            if host.code is None and host.process.poll() is not None:
                self._host_ended(host, host.process.returncode)
        if self._router and self._router.poll() is not None and not self._kill_all_at:
            self.console.say(
                f"the router between the hosts ended with exit code {self._router.returncode}; ending all hosts"
            )
            self._end_all_at = now
        if self.signals and (self._end_all_at is None or self._end_all_at > now):
            self.console.say(f"{signal.Signals(self.signals[0]).name}: ending all hosts")
            self._end_all_at = now
        if self._end_all_at is not None and now >= self._end_all_at and self._kill_all_at is None:
            self._kill_all_at = now + END_SECONDS
            for host in self._running():
                host.ended_by_us = True
                host.tell(END)
        if self._kill_all_at is not None and (now >= self._kill_all_at or len(self.signals) > 1):
            for host in self._running():
                self._power_off(host)

    def _running(self) -> list[RunningHost]:
        return [host for host in self.hosts.values() if host.code is None and host.process.poll() is None]

    def _print_output(self, host: RunningHost) -> None:
        """Print what the host prints, on a thread, until it ends."""
        assert host.process.stdout is not None
        for line in host.process.stdout:
            text = line.rstrip(b"\r\n").decode(errors="replace")
            host.cause.read(text)
            try:
                self.console.line(host.name, host.plan.index, text)
            except BrokenPipeError as error:  # as in `... | head`
                self._reader_gone = error

    def _host_ended(self, host: RunningHost, code: int) -> None:
        host.printer.join(PRINT_SECONDS)
        host.code = exit_code(code)
        self.ended.append(host)
        last = b""
        with contextlib.suppress(BlockingIOError):
            last = host.control.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT)  # its process has ended: all it sent is here
        if last and (left := json.loads(last)["left"]):
            self.console.say(f"{host.name}: outlived torchrun and were ended: {', '.join(left)}")
        if host.killed:
            self.console.say(f"{host.name} is gone, killed on purpose")
        elif host.ended_by_us:
            self.console.say(f"{host.name} was ended")
        else:
            self.console.say(f"{host.name}: torchrun {'FAILED' if host.code else 'ended'} with exit code {host.code}")
        running = [other.name for other in self.hosts.values() if other.code is None]
        if host.code and running and self._end_all_at is None:
            patience = self.plan.options.patience
            self._end_all_at = time.monotonic() + patience
            self.console.say(f"{', '.join(running)}: {patience:g} s left to end")

    def _phase(self, host: RunningHost, phase: str, step: int | None) -> None:
        """Do what must be done before a rank of the host begins a phase."""
        self.phases[host.name].add(phase)
        for fault in list(self.waiting):
            if fault.matches(host.name, phase, step):
                self._do(fault, at(phase, step))

    def _do(self, fault: HostFault, when: str) -> None:
        self.waiting.remove(fault)
        host = self.hosts[fault.host]
        if fault.kind == "cut":
            self._cut(host)
            self.console.say(f"cut {host.name} from the others {when}")
        else:
            host.killed = True
            if self._router_control:
                self._cut(host)  # no power, no packet: the kernel would tell every peer that the connection is closed
            self._power_off(host)
            self.console.say(f"killed {host.name} {when}")

    def _cut(self, host: RunningHost) -> None:
        assert self._router_control is not None
        self._router_control.send(json.dumps({"cut": host.name}).encode())
        if self._router_control.recv(MESSAGE_BYTES) != b"done":
            raise StartError("the router between the hosts is gone.")

    def _power_off(self, host: RunningHost) -> None:
        """Kill all of its processes at once; return when they are gone."""
        if not host.init:
            host.process.kill()  # it has not come up; what it started dies with it
        elif self.plan.namespaces:
            with contextlib.suppress(ProcessLookupError):  # it ended this moment
                os.kill(host.init, signal.SIGKILL)
        else:
            host.tell(KILL)
        host.process.wait()

    def _end(self, spare: int) -> None:
        """Leave nothing, whatever happened."""
        for host in self._running():
            self._power_off(host)
        for host in self.hosts.values():
            host.control.close()
        if self._router and self._router_control:
            self._router_control.close()
            self._router.wait()
        end_descendants(spare=spare)  # of hosts without namespaces whose own process was killed by others

    def _exit_code(self) -> int:
        """Return that of the rank that failed first, if torchrun reported it."""
        if self.signals:
            return 128 + self.signals[0]
        if self._router and self._router.poll() is not None:
            return 1  # it serves until its control socket closes, which is after this
        if any(host.code for host in self.ended):
            codes = [host.cause.code or 0 for host in self.ended if not host.killed]
            return next((code for code in codes if code > 1), 1)
        for fault in self.waiting:
            seen = ", ".join(sorted(self.phases[fault.host])) or "none"
            why = f"phases that {fault.host} began: {seen}" if fault.phase else f"{fault.host} had ended"
            self.console.say(f"{fault} never happened; {why}")
        return MISTAKE if self.waiting else 0


def _start_process(
    module: str, argument: str, descriptors: Sequence[int] = (), output: int | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a module of this package with one end of a control socket; return the process and the other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", f"harness.tools.hosts.{module}", str(theirs.fileno()), argument],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output and subprocess.STDOUT,
        pass_fds=(theirs.fileno(), *descriptors),
        start_new_session=True,  # Ctrl-C is the launcher's, which ends the hosts in order
    )
    theirs.close()
    return process, ours


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
