"""What ends a run in one sentence: a user's mistake (exit code 2), a machine that cannot run it (125, which `git bisect run`
reads as skip), or SIGTERM (143, as a shell says). Imports the standard library only.
"""

import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

MISTAKE, CANNOT_RUN_HERE, STOPPED = 2, 125, 143

SPEAK_FIRST_SECONDS = 1.0
"""How long other ranks wait: torchrun ends all ranks at the first exit, rank 0 perhaps in mid-word."""
SPEAK_ALONE_SECONDS = 3.0
"""How long a rank waits that may be the only one with this mistake; torchrun has ended it by then if rank 0 had it too."""
TORCHRUN_SECONDS = 60.0
"""How long torchrun may take to end once a rank has; it sends SIGKILL to the others after 30."""
SPEAKS_LAST = "HARNESS_SPEAKS_LAST"
"""Variable of the process that prints below torchrun's report: it outlives the run, and the watchdog leaves it alone."""


class UnsupportedEnvironment(RuntimeError):
    """What was asked is right, but this machine or this sglang cannot do it."""


class Stopped(Exception):
    """SIGTERM came, and all that is needed to resume is saved."""


def report_user_error(error: Exception, rank: int, alone: bool = False) -> int:
    """Print the sentence on rank 0, at once and, under torchrun, again below torchrun's own report; return the exit code.

    alone: other ranks may not have this mistake, so each prints it, unless rank 0 has ended the run before.
    """
    if rank:
        time.sleep(SPEAK_ALONE_SECONDS if alone else SPEAK_FIRST_SECONDS)
    if rank == 0 or alone:
        label = "stopped" if isinstance(error, Stopped) else "error"
        sentence = f"{label}: {error}\n" if rank == 0 else f"{label} on rank {rank}: {error}\n"
        sys.stderr.write(sentence)
        sys.stderr.flush()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            _say_below_torchrun(sentence)
    if isinstance(error, Stopped):
        return STOPPED
    return CANNOT_RUN_HERE if isinstance(error, UnsupportedEnvironment) else MISTAKE


def say(text: str, descriptor: int = 2) -> None:
    """Print a block on standard error in one write, so that no line of another process comes between.

    Raise nothing: the screen may be gone.
    """
    with suppress(OSError):
        os.write(descriptor, text.encode())


def say_after(pid: int, sentence: str) -> None:
    """Wait until that process has ended, then print on its standard error, or on ours where that cannot be opened.

    Nothing if it is still there after TORCHRUN_SECONDS: the sentence has been printed once already.
    """
    screen = 2
    with suppress(OSError):  # a socket, or another user's
        screen = os.open(f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK)
    with suppress(ProcessLookupError):  # it has ended already
        if not select.select([os.pidfd_open(pid)], [], [], TORCHRUN_SECONDS)[0]:
            return
    os.write(screen, sentence.encode())


def _say_below_torchrun(sentence: str) -> None:
    """By a process that outlives this one: torchrun prints its report once its ranks have ended.

    The shell leaves it behind at once, so that it is no child of this rank, which ends its children when it leaves.
    """
    with suppress(OSError):  # no memory, or no /proc: it stands above torchrun's report then
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", sys.executable, "-S", "-E", __file__, str(launcher_pid()), sentence],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {SPEAKS_LAST: "1"},
            start_new_session=True,
            check=False,
        )


def launcher_pid() -> int:
    """Return the pid of the nearest ancestor that is no rank and no wrapper of one: torchrun."""
    pid = os.getppid()
    with suppress(PermissionError):  # another user's, so no rank of ours
        while pid > 1 and b"\0LOCAL_RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return pid


if __name__ == "__main__":
    say_after(int(sys.argv[1]), sys.argv[2])
