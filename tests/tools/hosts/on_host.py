"""What tests run on an emulated host: `on_host.py INDEX WHAT [ARGUMENTS]`. Answers with one line of JSON."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from harness.tools.hosts.phase_gate import PHASE_SOCKET, EmulatedHost

PORT = 5000
SECONDS = 20.0


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def identity(index: int) -> None:
    Path("/dev/shm/mine").write_text(str(index))
    time.sleep(2.0)  # the other host has written too
    say(
        hostname=socket.gethostname(),
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        shm={file.name: file.read_text() for file in Path("/dev/shm").iterdir()},
        processes=sum(name.isdigit() for name in os.listdir("/proc")),
        interfaces=[name for _, name in socket.if_nameindex()],
        sysfs=sorted(os.listdir("/sys/class/net")),
        hosts=Path("/etc/hosts").read_text(),
        tmpdir=os.environ["TMPDIR"],
        own=sorted({str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), 1)}),
    )


def connection(index: int, name: str) -> socket.socket:
    """Host0's side and host1's of one TCP connection to host0's name."""
    family = socket.getaddrinfo(name, PORT)[0][0]
    if index == 0:
        with socket.create_server(("::" if family == socket.AF_INET6 else "", PORT), family=family) as listener:
            listener.settimeout(SECONDS)
            return listener.accept()[0]
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return socket.create_connection((name, PORT), timeout=SECONDS)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def ping(index: int, name: str) -> None:
    """Round trips, in seconds."""
    with connection(index, name) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(5):
            started = time.monotonic()
            if index:
                peer.sendall(b"?")
                assert peer.recv(1) == b"!"
                trips.append(time.monotonic() - started)
            else:
                assert peer.recv(1) == b"?"
                peer.sendall(b"!")
        if index:
            say(trips=trips, peer=peer.getpeername()[0], own=peer.getsockname()[0])


def phases(index: int, name: str) -> None:
    """Two steps of one phase with a phase_client each, under an open connection: what does host0 see of host1's end?"""
    phase_client = EmulatedHost(os.environ[PHASE_SOCKET], lambda: None).phase_begins
    with connection(index, name) as peer:
        for step in range(2):
            if index:
                phase_client("sync", step)
                peer.sendall(b"%d" % step)
            else:
                peer.settimeout(2.0 if step else SECONDS)
                try:
                    say(got=peer.recv(1).decode())
                except TimeoutError:
                    say(got="silence")


def wait(index: int, marker: str) -> None:
    """Wait, with a daemon that left its parent and its session, and a folder as a run makes them."""
    Path(f"/tmp/harness-{os.getuid()}-{os.stat('/proc/self/ns/pid').st_ino}-{os.getpid()}-{marker}").mkdir(0o700)
    code = f"import time; time.sleep(600); {marker!r}"
    subprocess.run(["setsid", "--fork", sys.executable, "-c", code], check=True)
    say(waiting=marker)
    time.sleep(600)


def leave(index: int, marker: str) -> None:
    """End at once, and leave a process behind on host1."""
    if index:
        subprocess.Popen(["sleep", "600"])
    say(left=marker)


def fail(index: int) -> None:
    """Host1 fails; host0 would go on."""
    if index:
        sys.exit(3)
    time.sleep(600)


def quit_parent(index: int) -> None:
    """Leave an orphan that sends SIGQUIT to its parent, as a scheduler of SGLang does; end once it has."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        first = os.getpid()
        if os.fork() == 0:
            while os.getppid() == first:
                time.sleep(0.01)
            os.kill(os.getppid(), signal.SIGQUIT)
            os.write(writer, b"done")
        os._exit(0)
    os.wait()
    assert os.read(reader, 4) == b"done"


def nothing(index: int) -> None:
    """End at once."""


if __name__ == "__main__":
    globals()[sys.argv[2]](int(sys.argv[1]), *sys.argv[3:])
