"""Hosts from start to end: their processes, the network between them, faults at their time, and one end for all."""

import contextlib
import math
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from harness.runtime.errors import MISTAKE
from harness.tools.hosts import kernel
from harness.tools.hosts.host import APART, GO, KILL, MESSAGE_BYTES, UP, WIRED, HostSpec, exit_code
from harness.tools.hosts.host_plan import (
    MASTER_PORT,
    EmulationPlan,
    HostFault,
    HostPlan,
    environment,
    hosts_file,
    torchrun,
)
from harness.tools.hosts.phase_gate import PhaseServer
from harness.tools.interrupts import say_interrupted
from harness.tools.run_tree import adopt_orphans, kill_descendants

REPOSITORY = Path(__file__).resolve().parents[3]
POLL_SECONDS = 0.2
END_SECONDS = 20.0
"""From a signal to torchrun until what is left of a host is killed."""
PRINT_SECONDS = 5.0
"""How long the last lines of a host may take to print."""


class StartError(RuntimeError):
    """A host did not come up; its output says why."""


@dataclass(slots=True)
class RunningHost:
    """A host, from its start to its end."""

    plan: HostPlan
    process: subprocess.Popen[bytes]
    control: socket.socket
    printer: threading.Thread = field(default_factory=threading.Thread)
    code: int | None = None
    """torchrun's exit code, or 128 + N if signal N ended it."""
    end: str = ""
    """How we ended it, if we did."""

    def tell(self, message: bytes) -> None:
        """Send a message to the host's process, unless it has just ended."""
        with contextlib.suppress(BrokenPipeError):
            self.control.send(message)

    def power_off(self) -> None:
        """Kill all of its processes at once; return when they are gone."""
        self.tell(KILL)
        self.process.wait()


class Emulation:
    """One use of launch/hosts.py, from the main thread."""

    def __init__(
        self, plan: EmulationPlan, command: Callable[[EmulationPlan, HostPlan, int], tuple[str, ...]] = torchrun
    ) -> None:
        """command: what a host runs, given a port that is free on host0."""
        self.plan, self.command = plan, command
        self.hosts: dict[str, RunningHost] = {}
        self.ended: list[RunningHost] = []
        self.waiting = list(plan.faults)
        self.signals: list[int] = []
        self._started = time.monotonic()
        self._folder = Path()
        self._selector = selectors.DefaultSelector()
        self._switch: kernel.Links | None = None
        self._end_at = self._kill_at = math.inf

    def run(self) -> int:
        """Start all, wait for all, leave nothing; return the exit code."""
        adopt_orphans()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda number, frame: self.signals.append(number))
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        try:
            self._start()
            while any(host.code is None for host in self.hosts.values()):
                self._turn()
            return self._exit_code()
        except StartError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        finally:  # leave nothing, whatever happened
            for host in self._running():
                host.power_off()
            if self._switch:
                self._switch.close()
            kill_descendants()  # left by hosts without namespaces, if someone killed their first process
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        port, first = MASTER_PORT, self.plan.hosts[0].addresses[0]
        if not self.plan.namespaces:
            family = socket.AF_INET6 if ":" in first else socket.AF_INET
            with socket.create_server((first, 0), family=family) as probe:
                port = probe.getsockname()[1]
        if self.plan.namespaces:
            self._switch = kernel.open_switch()
        for plan in self.plan.hosts:
            self._start_host(plan, port)
        for host in self.hosts.values():
            self._meet(host)
        for host in self.hosts.values():
            host.tell(GO)
        self._started = time.monotonic()
        how = "in namespaces" if self.plan.namespaces else "as processes, on loopback"
        where = ", ".join(f"{host.name} {' '.join(host.addresses)}" for host in self.plan.hosts)
        self._say(f"{len(self.plan.hosts)} hosts of {self.plan.ranks_per_host} ranks {how}: {where}")

    def _start_host(self, plan: HostPlan, port: int) -> None:
        folder = self._folder / plan.name
        (folder / "tmp").mkdir(parents=True)
        (folder / "hosts").write_text(hosts_file(self.plan, plan), encoding="ascii")
        (folder / "boot_id").write_text(f"{uuid.uuid4()}\n", encoding="ascii")
        spec = HostSpec(
            plan=plan,
            namespaces=self.plan.namespaces,
            folder=str(folder),
            command=self.command(self.plan, plan, port),
            environment=environment(self.plan, plan, folder),
            working_folder=str(Path.cwd()),
        )
        host = self.hosts[plan.name] = RunningHost(plan, *_start_process(spec))
        host.printer = threading.Thread(target=self._print_output, args=(host,), daemon=True)
        host.printer.start()
        if any(fault.phase for fault in self.plan.faults):
            PhaseServer(folder / "phases", self._selector, lambda phase, step: self._phase(plan.name, phase, step))

    def _meet(self, host: RunningHost) -> None:
        """Connect the host to the others, and wait until it is up."""
        if self._switch:
            self._expect(host, APART)
            *decoys, last = host.plan.interfaces
            for name in (*decoys, last):
                self._switch.add_cable(_cable(host.plan, name), host.process.pid, name, bridged=name == last)
            host.tell(WIRED)
        self._expect(host, UP)

    def _expect(self, host: RunningHost, message: bytes) -> None:
        if host.control.recv(MESSAGE_BYTES) != message:
            host.process.wait()
            host.printer.join(PRINT_SECONDS)
            raise StartError(f"{host.plan.name} did not come up.")

    def _turn(self) -> None:
        """Wait for something to happen, a moment at most, and react."""
        for key, _ in self._selector.select(POLL_SECONDS):
            key.data()
        now = time.monotonic()
        for fault in list(self.waiting):
            due = not fault.phase and now - self._started >= fault.seconds
            if due and self.hosts[fault.host].code is None:
                self._do(fault)
        for host in self.hosts.values():
            if host.code is None and host.process.poll() is not None:
                self._host_ended(host, host.process.returncode)
        if self.signals and self._end_at > now:
            self._say(f"{signal.Signals(self.signals[0]).name}; ending all hosts")
            self._end_at = 0.0
        if self._end_at <= now and self._kill_at == math.inf:
            self._kill_at = now + END_SECONDS
            for host in self._running():
                host.end = "was ended"
                host.tell(b"%d" % (signal.SIGINT if signal.SIGINT in self.signals else signal.SIGTERM))
        if now >= self._kill_at or len(self.signals) > 1:
            for host in self._running():
                host.power_off()

    def _running(self) -> list[RunningHost]:
        return [host for host in self.hosts.values() if host.code is None and host.process.poll() is None]

    def _say(self, text: str) -> None:
        """Print a line of the launcher, with the time since the start."""
        print(f"hosts: {text} ({time.monotonic() - self._started:.1f} s)\n", end="", flush=True)

    def _print_output(self, host: RunningHost) -> None:
        """Print what the host prints, on a thread, until it ends."""
        assert host.process.stdout is not None
        name = host.plan.name.ljust(len(self.plan.hosts[-1].name))
        for line in host.process.stdout:
            text = line.rstrip(b"\r\n").decode(errors="replace")
            try:
                print(f"{name} | {text}\n", end="", flush=True)  # one write: every host has a thread that prints
            except BrokenPipeError:  # as in `... | head`
                self.signals.append(signal.SIGPIPE)

    def _host_ended(self, host: RunningHost, code: int) -> None:
        host.printer.join(PRINT_SECONDS)
        host.code = exit_code(code)
        self.ended.append(host)
        torchrun_ended = f": torchrun {'FAILED' if host.code else 'ended'} with exit code {host.code}"
        self._say(host.plan.name + (f" {host.end}" if host.end else torchrun_ended))
        running = [name for name, other in self.hosts.items() if other.code is None]
        if host.code and running and self._end_at == math.inf:
            patience = self.plan.options.patience
            self._end_at = time.monotonic() + patience
            self._say(f"{', '.join(running)}: {patience:g} s left to end")

    def _phase(self, host: str, phase: str, step: int | None) -> None:
        """Do what must be done before a rank of the host begins a phase."""
        for fault in list(self.waiting):
            if (fault.host, fault.phase) == (host, phase) and fault.step in (None, step):
                self._do(fault)

    def _do(self, fault: HostFault) -> None:
        self.waiting.remove(fault)
        host = self.hosts[fault.host]
        # A killed host is cut off too: no power, no packet. The kernel would tell every peer that the connection is
        # closed.
        if self._switch:
            self._switch.unplug(_cable(host.plan, list(host.plan.interfaces)[-1]))
        if fault.kind == "cut":
            self._say(f"cut {fault.host} from the others {fault.when}")
        else:
            host.end = "is gone, killed on purpose"
            host.power_off()
            self._say(f"killed {fault.host} {fault.when}")

    def _exit_code(self) -> int:
        """Return 128 + N after signal N, the exit code of the rank that failed first (1 if unknown), 2 or 0."""
        if self.signals:
            say_interrupted("launch/hosts.py", self.signals[0], "")
            return 128 + self.signals[0]
        if any(host.code for host in self.ended):
            return next((host.code for host in self.ended if host.code and 1 < host.code < 128 and not host.end), 1)
        for fault in self.waiting:
            self._say(f"{fault.kind} {fault.host} {fault.when} never happened")
        return MISTAKE if self.waiting else 0


def _cable(host: HostPlan, interface: str) -> str:
    """Return the name of a cable's end at the bridge; the kernel allows 15 characters."""
    return f"{host.name}-{interface}"


def _start_process(spec: HostSpec) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a host's process, send it its spec over a control socket; return the process and our end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.tools.hosts.host", str(theirs.fileno())],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(theirs.fileno(),),
        start_new_session=True,  # Ctrl-C is the launcher's, which ends the hosts in order
    )
    theirs.close()
    ours.send(msgspec.json.encode(spec))
    return process, ours
