"""How a process ended that is not our child: from /proc until its parent has asked, from the kernel's pidfd afterwards."""

import fcntl
import os
import select
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field

from harness.tools.watchdog.processes import how_it_ended, said_status

# struct pidfd_info, its first version: mask, cgroup, eleven numbers of 4 bytes of which the last is the exit code.
_SIZE, _EXIT_CODE_AT = 64, 60
_PIDFD_GET_INFO = (3 << 30) | (_SIZE << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3


@dataclass(slots=True)
class Death:
    """Of one process, noted on a separate thread at the moment when it happens: torchrun asks ten times a second, and
    /proc forgets."""

    pid: int
    how: str | None = None
    """As from how_it_ended; None while it lives, or where it was not seen."""
    over: threading.Event = field(default_factory=threading.Event)
    """Set at its end, and where it cannot be watched."""

    def watch(self) -> "Death":
        """Begin."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:  # it has ended, or this kernel has none
            self.over.set()
            return self
        threading.Thread(target=self._wait, args=[descriptor], name=f"death of {self.pid}", daemon=True).start()
        return self

    def _wait(self, descriptor: int) -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
        self.how = how_it_ended(self.pid) or _kernels_word(descriptor)
        os.close(descriptor)
        self.over.set()


def _kernels_word(descriptor: int) -> str | None:
    """How it ended whose parent has asked already, which Linux says since 6.15; else None."""
    answer = bytearray(struct.pack("Q", _PIDFD_INFO_EXIT) + bytes(_SIZE - 8))
    with suppress(OSError):
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, answer)
        (mask,), (status,) = struct.unpack_from("Q", answer), struct.unpack_from("i", answer, _EXIT_CODE_AT)
        if mask & _PIDFD_INFO_EXIT:
            return said_status(status)
    return None
