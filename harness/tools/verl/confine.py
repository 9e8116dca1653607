"""Confine the process that reads a script: one process group for all that it starts, and limits on what it takes."""

import ctypes
import os
import platform
import resource
import struct

MEMORY = 1 << 30
OUTPUT = 64 << 20
"""Limits of each process, in bytes: its memory, and a file that it writes."""

_LEAVE_GROUP = {"x86_64": (0xC000003E, 109, 112), "aarch64": (0xC00000B7, 154, 157)}
"""Machine -> AUDIT_ARCH, and the numbers of the system calls setpgid and setsid."""
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _DO_NOTHING = 0x7FFF0000, 0x00050000


def confine() -> None:
    """Confine this process and all that it will start. Raise OSError if the kernel cannot.

    With job control, bash moves each background job to a process group; a job that starts the next one and ends could escape
    the signal that ends the others for ever. So the system calls that leave a group succeed without doing anything.
    """
    for kind, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_FSIZE, OUTPUT)):
        resource.setrlimit(kind, (most, most))
    if platform.machine() not in _LEAVE_GROUP:
        raise OSError(f"no system call numbers for {platform.machine()}")
    architecture, *calls = _LEAVE_GROUP[platform.machine()]
    steps = [
        (_LOAD, 0, 0, 4),  # the architecture
        (_JUMP_IF_EQUAL, 0, 3, architecture),
        (_LOAD, 0, 0, 0),  # the system call
        (_JUMP_IF_EQUAL, 2, 0, calls[0]),
        (_JUMP_IF_EQUAL, 1, 0, calls[1]),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DO_NOTHING),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(_SECCOMP, _FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
