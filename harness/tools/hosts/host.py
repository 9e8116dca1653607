"""The process that is one host: it makes the host's namespaces, is their process 1, and runs torchrun in them.

Without namespaces it runs torchrun as the ancestor of all that torchrun starts. Either way it ends all of it, and removes
the host's folder, when the launcher's end of the control socket closes, which a killed launcher's does too.
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from harness.runtime.processes import descendants, name_and_pid
from harness.tools.hosts import kernel
from harness.tools.hosts.host_plan import HostPlan

POLL_SECONDS = 0.1
LINGER_SECONDS = 2.0
"""How long what torchrun started may outlive it before it counts as left behind."""
MESSAGE_BYTES = 1 << 20
LAUNCHER_GONE = 1
UP, GO, END, KILL = b"up", b"go", b"end", b"kill"


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """What a host's process gets over the control socket, as JSON."""

    plan: HostPlan
    namespaces: bool
    folder: str
    """The host's own; holds "hosts", which becomes /etc/hosts, "boot_id" and "tmp"."""
    command: tuple[str, ...]
    environment: dict[str, str]
    """Changes to the launcher's environment, for the command only."""
    working_folder: str


def main(control: socket.socket) -> int:
    """Run as the host until its command exits; return the command's exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    message = control.recv(MESSAGE_BYTES)
    if not message:
        return LAUNCHER_GONE
    spec = msgspec.json.decode(message, type=HostSpec)
    try:
        if spec.namespaces:
            return _run_in_namespaces(spec, control)
        kernel.adopt_orphans()
        control.send(UP)
        return _supervise(spec, control)
    finally:
        shutil.rmtree(spec.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another host's is still there
            Path(spec.folder).parent.rmdir()


def _run_in_namespaces(spec: HostSpec, control: socket.socket) -> int:
    kernel.unshare(kernel.HOST_NAMESPACES)
    child = os.fork()
    if child:
        control.close()
        return exit_code(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    code = 1
    try:  # as process 1, with which the kernel ends every other
        kernel.die_with_parent(signal.SIGKILL)
        descriptors = _furnish(spec)
        socket.send_fds(control, [UP], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        code = _supervise(spec, control)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _furnish(spec: HostSpec) -> list[int]:
    """Set up name, boot id, /proc, /sys, /dev/shm, /etc/hosts and interfaces; return the interfaces' descriptors."""
    folder, aside = Path(spec.folder), Path(spec.folder) / "cgroup"
    socket.sethostname(spec.plan.name)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("proc", "/proc", "proc")
    # A /sys that lists this network namespace's interfaces, with the cgroups of the old one.
    aside.mkdir()
    kernel.mount("/sys/fs/cgroup", str(aside), None, kernel.MS_BIND | kernel.MS_REC)
    kernel.mount("sysfs", "/sys", "sysfs")
    kernel.mount(str(aside), "/sys/fs/cgroup", None, kernel.MS_BIND | kernel.MS_REC)
    kernel.unmount(str(aside))
    kernel.mount("tmpfs", "/dev/shm", "tmpfs")
    kernel.mount(str(folder / "hosts"), "/etc/hosts", None, kernel.MS_BIND)
    kernel.mount(str(folder / "boot_id"), "/proc/sys/kernel/random/boot_id", None, kernel.MS_BIND)
    kernel.bring_up("lo")
    descriptors = []
    for name, addresses in spec.plan.interfaces.items():
        descriptors.append(kernel.open_tun(name))
        switch = Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6")
        if switch.exists() and not any(":" in each for each in addresses):
            switch.write_text("1", encoding="ascii")
        kernel.bring_up(name, addresses)
    return descriptors


def _supervise(spec: HostSpec, control: socket.socket) -> int:
    """Run the command on GO, end it on END; print what outlived it, end that, return its exit code."""
    if control.recv(MESSAGE_BYTES) != GO:
        return LAUNCHER_GONE
    command = subprocess.Popen(
        spec.command, cwd=spec.working_folder, env=os.environ | spec.environment, stdin=subprocess.DEVNULL
    )
    code = None
    while code is None:
        if select.select([control], [], [], POLL_SECONDS)[0]:
            if control.recv(MESSAGE_BYTES) != END:  # KILL, or the launcher is gone
                end_descendants()
                return exit_code(-signal.SIGKILL)
            os.kill(command.pid, signal.SIGTERM)
        code = _reap(command.pid)
    deadline = time.monotonic() + LINGER_SECONDS
    while (left := descendants()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS / 2)
        _reap(0)
    if left:
        print(f"outlived torchrun and were ended: {', '.join(map(name_and_pid, left.values()))}", flush=True)
    end_descendants()
    return code


def _reap(wanted: int) -> int | None:
    """Reap every child that has ended, adopted ones too; return the exit code of the wanted one if it is among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == wanted:
                code = exit_code(os.waitstatus_to_exitcode(ended[1]))
    return code


def end_descendants() -> None:
    """SIGKILL them all; first stop them, so that none sees another's end. Return when all are gone."""
    while left := list(descendants().values()):
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended, which is what was wanted
                    process.send_signal(signum)
        _reap(0)
        time.sleep(POLL_SECONDS / 10)


def exit_code(code: int) -> int:
    """Return the exit code of a shell for that of subprocess: 128 + N for signal N."""
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(socket.socket(fileno=int(sys.argv[1]))))
