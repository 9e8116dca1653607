"""The process that is one host: it makes the host's namespaces, is their process 1, and runs torchrun in them.

Without namespaces it runs torchrun as an ordinary child. Either way it ends everything that torchrun started and
removes the host's folder when the launcher's end of the control socket closes, as it does when the launcher is killed.
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

from harness.runtime.files import is_own_folder
from harness.runtime.processes import descendants
from harness.tools.hosts import kernel
from harness.tools.hosts.host_plan import HostPlan
from harness.tools.run_tree import adopt_orphans, die_with_parent, kill_descendants, name_and_pid, reap

POLL_SECONDS = 0.1
LINGER_SECONDS = 2.0
"""How long what torchrun started may outlive it before it counts as left behind."""
MESSAGE_BYTES = 1 << 20
LAUNCHER_GONE = 1
APART, WIRED, UP, GO, KILL = b"apart", b"wired", b"up", b"go", b"kill"
"""Messages. The host says that it is in its namespaces (APART) and ready (UP); the launcher says the others, or the
number of a signal by which torchrun is to end."""


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
    signal.signal(signal.SIGINT, lambda number, frame: None)  # a handler, unlike SIG_IGN, is not inherited
    message = control.recv(MESSAGE_BYTES)
    if not message:
        return LAUNCHER_GONE
    spec = msgspec.json.decode(message, type=HostSpec)
    try:
        if spec.namespaces:
            return _run_in_namespaces(spec, control)
        adopt_orphans()
        control.send(UP)
        return _supervise(spec, control)
    finally:
        shutil.rmtree(spec.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another host's is still there
            Path(spec.folder).parent.rmdir()


def _run_in_namespaces(spec: HostSpec, control: socket.socket) -> int:
    kernel.unshare(kernel.HOST_NAMESPACES)
    control.send(APART)
    if control.recv(MESSAGE_BYTES) != WIRED:
        return LAUNCHER_GONE
    child = os.fork()
    if child:
        control.close()
        return exit_code(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    code = 1
    try:  # as process 1, with which the kernel ends every other
        die_with_parent()
        _furnish(spec)
        control.send(UP)
        code = _supervise(spec, control)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _furnish(spec: HostSpec) -> None:
    """Set up the host's name, boot id, /proc, /sys, /dev/shm, /etc/hosts and interfaces."""
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
    links = kernel.Links()
    links.bring_up("lo")
    for name, addresses in spec.plan.interfaces.items():
        switch = Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6")
        if switch.exists() and not any(":" in each for each in addresses):
            switch.write_text("1", encoding="ascii")
        links.bring_up(name, addresses)
    links.close()


def _supervise(spec: HostSpec, control: socket.socket) -> int:
    """Run the command on GO, end it by a signal when told to; name and end what outlived it, and return its exit code."""
    if control.recv(MESSAGE_BYTES) != GO:
        return LAUNCHER_GONE
    # A scheduler of SGLang that fails sends SIGQUIT to its parent, and the parent of an orphan is this process.
    signal.signal(signal.SIGQUIT, lambda number, frame: None)
    command = subprocess.Popen(
        spec.command, cwd=spec.working_folder, env=os.environ | spec.environment, stdin=subprocess.DEVNULL
    )
    code = None
    try:
        while code is None:
            if select.select([control], [], [], POLL_SECONDS)[0]:
                message = control.recv(MESSAGE_BYTES)
                if message in (KILL, b""):  # empty: the launcher is gone
                    return exit_code(-signal.SIGKILL)
                os.kill(command.pid, int(message))
            code = reap(command.pid)
        deadline = time.monotonic() + LINGER_SECONDS
        while (left := descendants()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 2)
            reap()
        if left:
            print(f"ended what outlived torchrun: {', '.join(map(name_and_pid, left.values()))}", flush=True)
        return exit_code(code)
    finally:
        kill_descendants()
        _remove_run_folders(command.pid)


def _remove_run_folders(torchrun: int) -> None:
    """Remove the temporary folders of this host's ranks that are in /tmp itself, since the path of the host's own is too
    long for their sockets. Ranks and a watchdog that are killed remove nothing.
    """
    name = f"harness-{os.getuid()}-{os.stat('/proc/self/ns/pid').st_ino}-{torchrun}-"  # see watchdog/client.py
    for folder in filter(is_own_folder, Path("/tmp").glob(f"{name}*")):
        shutil.rmtree(folder, ignore_errors=True)


def exit_code(code: int) -> int:
    """Turn an exit code of subprocess into a shell's: 128 + N for signal N."""
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(socket.socket(fileno=int(sys.argv[1]))))
