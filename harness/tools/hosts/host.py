"""The process that is one host: it makes the host's namespaces, is their process 1, and runs torchrun in them.

Without namespaces it runs torchrun as the ancestor of all that torchrun starts. Either way it ends all of it when the
launcher's end of the control socket closes, that is also when the launcher is killed.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from harness.tools.hosts import kernel

POLL_SECONDS = 0.1
LINGER_SECONDS = 2.0
"""How long what torchrun started may outlive it before it counts as left behind."""
MESSAGE_BYTES = 1 << 20
LAUNCHER_GONE = 1
GO, END, KILL = b"go", b"end", b"kill"


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface of a host."""

    name: str
    addresses: tuple[str, ...]
    """With prefix, such as 10.77.0.1/24."""


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """What a host's process is told."""

    name: str
    namespaces: bool
    boot_id: str
    interfaces: tuple[Interface, ...]
    mtu: int
    ipv6: bool
    folder: str
    """The host's own; holds "hosts", which becomes /etc/hosts, "boot_id" and "tmp"."""
    command: tuple[str, ...]
    environment: dict[str, str]
    """Changes to the launcher's environment, for the command only."""
    working_folder: str

    def to_json(self) -> bytes:
        """For the control socket."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "HostSpec":
        """The other end of to_json."""
        values = json.loads(text)
        return cls(**values | {"interfaces": tuple(Interface(**each) for each in values["interfaces"])})


def main(control: socket.socket, launcher: int) -> int:
    """Be the host until its command has ended; returns the command's exit code."""
    if os.getppid() != launcher:
        return LAUNCHER_GONE
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = HostSpec.from_json(control.recv(MESSAGE_BYTES))
    if not spec.namespaces:
        kernel.adopt_orphans()
        control.send(json.dumps({"init": os.getpid()}).encode())
        return supervise(spec, control)
    kernel.die_with_parent(signal.SIGKILL)
    kernel.unshare(kernel.HOST_NAMESPACES)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = first_process(spec, control)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    control.send(json.dumps({"init": child}).encode())
    control.close()
    _, status = os.waitpid(child, 0)
    return _exit_code(status)


def first_process(spec: HostSpec, control: socket.socket) -> int:
    """Process 1 of the host: with it the kernel ends every other."""
    kernel.die_with_parent(signal.SIGKILL)
    descriptors = furnish(spec)
    socket.send_fds(control, [b"network"], descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return supervise(spec, control)


def furnish(spec: HostSpec) -> list[int]:
    """Name, boot id, /proc, /sys, /dev/shm, /etc/hosts and interfaces; returns the interfaces' descriptors."""
    folder = Path(spec.folder)
    socket.sethostname(spec.name)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("proc", "/proc", "proc")
    _mount_sysfs(folder / "cgroup")
    kernel.mount("tmpfs", "/dev/shm", "tmpfs")
    kernel.mount(str(folder / "hosts"), "/etc/hosts", None, kernel.MS_BIND)
    kernel.mount(str(folder / "boot_id"), "/proc/sys/kernel/random/boot_id", None, kernel.MS_BIND)
    kernel.bring_up("lo", [])
    descriptors = []
    for interface in spec.interfaces:
        descriptors.append(kernel.open_tun(interface.name))
        if not spec.ipv6 and (switch := Path(f"/proc/sys/net/ipv6/conf/{interface.name}/disable_ipv6")).exists():
            switch.write_text("1", encoding="ascii")
        kernel.bring_up(interface.name, list(interface.addresses), spec.mtu)
    return descriptors


def _mount_sysfs(aside: Path) -> None:
    """A /sys that lists this network namespace's interfaces, with the cgroups of the old one."""
    aside.mkdir()
    kernel.mount("/sys/fs/cgroup", str(aside), None, kernel.MS_BIND | kernel.MS_REC)
    kernel.mount("sysfs", "/sys", "sysfs")
    kernel.mount(str(aside), "/sys/fs/cgroup", None, kernel.MS_BIND | kernel.MS_REC)
    kernel.unmount(str(aside))


def supervise(spec: HostSpec, control: socket.socket) -> int:
    """Run the command when told to go, end it when told to; say how it ended and what it left; returns its exit code."""
    if control.recv(MESSAGE_BYTES) != GO:
        return LAUNCHER_GONE
    command = subprocess.Popen(
        spec.command, cwd=spec.working_folder, env=os.environ | spec.environment, stdin=subprocess.DEVNULL
    )
    code = None
    while code is None:
        if select.select([control], [], [], POLL_SECONDS)[0]:
            message = control.recv(MESSAGE_BYTES)
            if message == END:
                os.kill(command.pid, signal.SIGTERM)
            else:  # to be killed, or the launcher is gone
                end_descendants()
                return 128 + signal.SIGKILL
        code = reap(command.pid)
    left = linger()
    end_descendants()
    with contextlib.suppress(BrokenPipeError):  # the launcher is gone
        control.send(json.dumps({"ended": code, "left": left}).encode())
    return code


def reap(wanted: int) -> int | None:
    """Reap every child that has ended, adopted ones too; the exit code of the wanted one where it is among them."""
    code = None
    while True:
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if child == 0:
            return code
        if child == wanted:
            code = _exit_code(status)


def linger() -> list[str]:
    """Wait for all descendants to end; returns names and numbers of those that do not."""
    deadline = time.monotonic() + LINGER_SECONDS
    while True:
        reap(0)
        left = psutil.Process().children(recursive=True)
        if not left or time.monotonic() > deadline:
            return [f"{_name(process)} ({process.pid})" for process in left]
        time.sleep(POLL_SECONDS / 2)


def end_descendants(spare: int = 0) -> None:
    """SIGKILL them all but one; first stopped, so that none sees another's end. Returns when all are gone."""
    while left := [process for process in psutil.Process().children(recursive=True) if process.pid != spare]:
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):  # it ended before, which is what was wanted
                    process.send_signal(signum)
        reap(0)
        time.sleep(POLL_SECONDS / 10)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "ended just now"


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])))
