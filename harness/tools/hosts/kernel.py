"""Linux calls of the hosts: namespaces, mounts, TUN interfaces with addresses, and processes that end together.

TUN interfaces and a router of our own (router.py) instead of veth, bridge and tc netem by pyroute2: they need /dev/net/tun
alone, where containers often lack the modules of the others, and packets can be counted and cut in one place. Interfaces
are set up by the ioctls of netdevice(7), which need neither iproute2 nor a netlink library.
"""

import ctypes
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Sequence
from ipaddress import IPv4Interface, IPv6Interface

from harness.tools.process_tree import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
HOST_NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 0x1000, 0x4000, 0x40000, 2

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8913, 0x8914, 0x8916, 0x891C
_SIOCSIFMTU, _SIOCSIFTXQLEN = 0x8922, 0x8943
_IFF_UP = 1
_MTU = 65000
_QUEUE_PACKETS = 4000  # a full queue drops, which TCP takes for loss

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


def die_with_parent(signum: int) -> None:
    """Get the signal when the thread that started this process ends; kept over exec, not over fork."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0), "prctl")


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, in the place of process 1. From the main thread.

    A scheduler of SGLang that fails sends SIGQUIT to its parent, which this process must survive.
    """
    signal.signal(signal.SIGQUIT, lambda number, frame: None)  # a handler, unlike SIG_IGN, is not inherited over exec
    _check(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def open_tun(name: str) -> int:
    """Return a TUN interface of this network namespace, as the descriptor with whose last copy it vanishes. Raise OSError."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def bring_up(name: str, addresses: Sequence[str] = ()) -> None:
    """Give the interface its addresses ("10.77.0.1/24", "fd77::1/64"), and switch it on. Raise OSError."""
    label = name.encode()
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as four,
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as six,
    ):
        if name != "lo":
            fcntl.ioctl(four, _SIOCSIFMTU, struct.pack("16si20x", label, _MTU))
            fcntl.ioctl(four, _SIOCSIFTXQLEN, struct.pack("16si20x", label, _QUEUE_PACKETS))
        flags = struct.unpack("16xh22x", fcntl.ioctl(four, _SIOCGIFFLAGS, struct.pack("16s24x", label)))[0]
        fcntl.ioctl(four, _SIOCSIFFLAGS, struct.pack("16sh22x", label, flags | _IFF_UP))
        for text in addresses:
            if ":" in text:
                own = IPv6Interface(text)
                packed = struct.pack("16sIi", own.ip.packed, own.network.prefixlen, socket.if_nametoindex(name))
                fcntl.ioctl(six, _SIOCSIFADDR, packed)
                continue
            address = IPv4Interface(text)
            for request, part in ((_SIOCSIFADDR, address.ip), (_SIOCSIFNETMASK, address.netmask)):
                fcntl.ioctl(four, request, struct.pack("16sHH4s16x", label, socket.AF_INET, 0, part.packed))


def refusal() -> str:
    """Return why this process may not make such hosts, "" if it may. Tried in a child that ends at once."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            unshare(HOST_NAMESPACES)
            mount("none", "/", None, MS_REC | MS_PRIVATE)
            for kind, target in (("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/dev/shm")):
                mount(kind, target, kind)
            open_tun("eth0")
        except OSError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as answer:
        return answer.read()
