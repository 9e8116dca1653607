"""Linux calls for emulated hosts: namespaces, mounts, and a network of veth pairs and a bridge.

This module makes system calls and writes rtnetlink messages itself, because containers often lack iproute2. Every
kernel that runs containers has veth and bridge.
"""

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Sequence
from ipaddress import ip_interface

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
HOST_NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 0x1000, 0x4000, 0x40000, 2

_NEW_LINK, _SET_LINK, _NEW_ADDRESS = 16, 19, 20  # requests of rtnetlink(7)
_REQUEST, _ACKNOWLEDGE, _CREATE = 0x1, 0x4, 0x400
_NAME, _MASTER, _INFO, _NAMESPACE_PID = 3, 10, 18, 19  # attributes of a link
_INFO_KIND, _INFO_DATA, _VETH_PEER = 1, 2, 1
_ADDRESS, _LOCAL, _NO_DUPLICATE_DETECTION = 1, 2, 0x2
_UP = 1
_BRIDGE = 1000  # the interface index that we give the bridge

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave the parent's namespaces of these kinds; a new pid namespace begins with the next child. Raise OSError."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str = "") -> None:
    """Mount a file system, as the system call of that name does. Raise OSError."""
    words = source.encode(), target.encode(), kind.encode() if kind else None
    _check(_libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None), f"mount {source} at {target}")


def unmount(target: str) -> None:
    """Take the mount from the tree; its users keep it. Raise OSError."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


class Links:
    """The network interfaces of the namespace in which this object was made. Every method may raise OSError."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
        self._socket.bind((0, 0))

    def add_bridge(self, name: str) -> None:
        """Add a bridge, and switch it on."""
        kind = _attribute(_INFO, _attribute(_INFO_KIND, b"bridge"))
        self._ask(_NEW_LINK, _CREATE, _link(_BRIDGE, _UP) + _attribute(_NAME, name.encode() + b"\0") + kind)

    def add_cable(self, name: str, pid: int, end: str, bridged: bool) -> None:
        """Add a veth pair: one end here, called `name`; the other in the namespace of that process, called `end`."""
        peer = _link() + _attribute(_NAME, end.encode() + b"\0") + _attribute(_NAMESPACE_PID, struct.pack("=I", pid))
        data = _attribute(_INFO_DATA, _attribute(_VETH_PEER, peer))
        body = _link(0, _UP) + _attribute(_NAME, name.encode() + b"\0")
        body += _attribute(_MASTER, struct.pack("=I", _BRIDGE)) if bridged else b""
        self._ask(_NEW_LINK, _CREATE, body + _attribute(_INFO, _attribute(_INFO_KIND, b"veth") + data))

    def unplug(self, name: str) -> None:
        """Take a cable out of the bridge. Both ends stay up, so that nobody notices by anything but silence."""
        body = _link() + _attribute(_NAME, name.encode() + b"\0") + _attribute(_MASTER, struct.pack("=I", 0))
        self._ask(_SET_LINK, 0, body)

    def bring_up(self, name: str, addresses: Sequence[str] = ()) -> None:
        """Give the interface its addresses ("10.77.0.1/24", "fd77::1/64"), and switch it on."""
        for text in addresses:
            own = ip_interface(text)
            family = socket.AF_INET if own.version == 4 else socket.AF_INET6
            # Without detection of duplicates, which delays an IPv6 address by a second.
            header = (family, own.network.prefixlen, _NO_DUPLICATE_DETECTION, 0, socket.if_nametoindex(name))
            packed = _attribute(_LOCAL, own.ip.packed) + _attribute(_ADDRESS, own.ip.packed)
            self._ask(_NEW_ADDRESS, _CREATE, struct.pack("=BBBBI", *header) + packed)
        self._ask(_SET_LINK, 0, _link(0, _UP) + _attribute(_NAME, name.encode() + b"\0"))

    def close(self) -> None:
        self._socket.close()

    def _ask(self, request: int, flags: int, body: bytes) -> None:
        header = struct.pack("=IHHII", 16 + len(body), request, _REQUEST | _ACKNOWLEDGE | flags, 1, 0)
        self._socket.send(header + body)
        if error := -struct.unpack_from("=i", self._socket.recv(1 << 16), 16)[0]:
            raise OSError(error, f"rtnetlink: {os.strerror(error)}")


def _link(index: int = 0, flags: int = 0) -> bytes:
    """Return the header of a message about a link: flags are those to switch on."""
    return struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, flags, flags)


def _attribute(kind: int, data: bytes) -> bytes:
    length = 4 + len(data)
    return struct.pack("=HH", length, kind) + data + bytes(-length % 4)


def open_switch() -> Links:
    """Return a bridge for the hosts, in a network namespace that lives as long as the object.

    A thread makes it, because a thread can enter another network namespace while its process stays in the machine's.
    """
    made: list[Links] = []
    failed: list[OSError] = []

    def make() -> None:
        try:
            unshare(CLONE_NEWNET)
            links = Links()
            links.add_bridge("hosts")
            made.append(links)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def refusal() -> str:
    """Return why this process may not make such hosts, "" if it may. Tried in a child that ends at once."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            switch = open_switch()
            unshare(HOST_NAMESPACES)
            switch.add_cable("test", os.getpid(), "eth0", bridged=True)
            Links().bring_up("eth0", ["10.77.0.1/24", "fd77::1/64"])
            mount("none", "/", None, MS_REC | MS_PRIVATE)
            for kind, target in (("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/dev/shm")):
                mount(kind, target, kind)
        except OSError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as answer:
        return answer.read()
