"""How a run ends with one sentence: a user's mistake (exit code 2), an environment that cannot run it (125, which
`git bisect run` takes as "skip"), the failure that was looked for (1), or SIGTERM (143, as in a shell).

torchrun prints its own report after its ranks have ended, so the sentence is printed twice: at once, and below that
report. launch/torchrun.py keeps that report off the screen, so the sentence is printed once; it returns only when the
watchdog of its host has ended and said everything. The ranks tell it how the run ends by files of a folder. Standard
library only.
"""

import fcntl
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from harness.runtime import redact
from harness.runtime.files import is_own_folder
from harness.runtime.installed import as_typed

CANNOT = "cannot run here: "
"""How a line begins with which a program says why, before it ends with exit code 125."""
APPEARED, MISTAKE, CANNOT_RUN_HERE, INTERRUPTED, STOPPED = 1, 2, 125, 130, 143

SPEAK_FIRST_SECONDS = 3.0
"""How long the other ranks wait for rank 0 to look at its host and print: torchrun ends all ranks as soon as one
exits. A rank whose mistake rank 0 does not have speaks then."""
TORCHRUN_SECONDS = 60.0
"""How long torchrun may take to end after its first rank; it sends SIGKILL to the other ranks after 30."""
SPEAKS_LAST = "HARNESS_SPEAKS_LAST"
"""Variable of the process that prints below torchrun's report. The watchdog leaves that process alone."""
STANDARD_ERROR = 2
_SAY_AFTER = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r}); "
    "from harness.runtime.errors import say_after; say_after(int(sys.argv[1]), sys.argv[2])"
)
LAUNCH_FOLDER = "HARNESS_LAUNCH"
"""Variable with the folder in which launch/torchrun.py and its ranks tell each other how their run ends."""
POLL_SECONDS = 0.05
_REPORT, _SAID, _WATCHDOG = "report", "said", "watchdog"


class UnsupportedEnvironment(RuntimeError):
    """The request is valid, but this machine or this SGLang cannot run it."""


class Stopped(Exception):
    """SIGTERM came, and everything that is needed to resume is saved."""


class Found(Exception):
    """The failure that a tool looks for has appeared; the sentence says what it is."""


def rank_in(environment: Mapping[str, str]) -> int:
    """Return the rank that torchrun gave this process; 0 if RANK is unset or invalid."""
    rank = environment.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def report_user_error(error: Exception, rank: int, alone: bool = False) -> int:
    """Print the sentence, or each of several, on rank 0 and return the exit code. Under torchrun, print it again below torchrun's report.

    alone: the other ranks may not have this mistake, so each rank prints its own unless rank 0 has ended the run
    before.
    """
    if rank:
        time.sleep(SPEAK_FIRST_SECONDS)
    if rank == 0 or alone:
        label = {Stopped: "stopped", Found: "found"}.get(type(error), "error")
        label = label if rank == 0 else f"{label} on rank {rank}"
        # One line for each of several mistakes of a config.
        say_twice("".join(f"{label}: {line}\n" for line in as_typed(redact.text(str(error))).split("\n")))
    if isinstance(error, Stopped | Found):
        return STOPPED if isinstance(error, Stopped) else APPEARED
    return CANNOT_RUN_HERE if isinstance(error, UnsupportedEnvironment) else MISTAKE


def say(text: str, screen: int = STANDARD_ERROR) -> None:
    """Print a block in one write, so that no line of another process comes between; ignore a screen that is gone."""
    with suppress(OSError):
        os.write(screen, in_utf8(text).encode())


def in_utf8(text: str) -> str:
    """Return the text with escapes for what no other program takes: half a surrogate pair, which an error may quote,
    and NUL.
    """
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\0")


def say_twice(text: str) -> None:
    """Print now and, under torchrun, again below torchrun's report. torchrun's report shows the text as well."""
    sys.stderr.write(text)
    sys.stderr.flush()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        tell_torchrun(text.strip())
        if launch_folder():
            tell_said()
        else:
            _say_below_torchrun(text)


def tell_torchrun(error: str, traceback: str = "") -> None:
    """Write the error file from which torchrun fills its report, as torch's @record does.

    Not @record itself: it only sees exceptions that leave main(), and a failed rank ends before that. A rank may be
    killed at any time, and half a file would end torchrun itself by an error (JSONDecodeError), with its exit code.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        details = {"py_callstack": traceback or error, "timestamp": str(int(time.time()))}
        with suppress(OSError):  # a full disk: the error is on the screen
            part = Path(f"{path}.part")
            part.write_text(json.dumps({"message": {"message": error, "extraInfo": details}}), encoding="utf-8")
            part.replace(path)


def screen_of(pid: int) -> int:
    """Open that process's standard error, which can differ from its ranks' (torchrun --tee).

    Return our own if the two are the same, or if it cannot be opened (a socket, or another user's).
    """
    theirs = Path(f"/proc/{pid}/fd/{STANDARD_ERROR}")
    with suppress(OSError):
        if not os.path.samestat(theirs.stat(), os.fstat(STANDARD_ERROR)):
            return os.open(theirs, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK)
    return STANDARD_ERROR


def launcher_pid() -> int:
    """Return the pid of torchrun: the nearest ancestor that is neither a rank nor a wrapper of one.

    Told by a variable that torchrun gives to its ranks alone. LOCAL_RANK may be in the shell that started torchrun too;
    it counts only where something else starts the ranks.
    """
    pid, of_ranks = os.getppid(), "TORCHELASTIC_RUN_ID" if "TORCHELASTIC_RUN_ID" in os.environ else "LOCAL_RANK"
    with suppress(PermissionError):  # another user's process is not a rank of ours
        while pid > 1 and f"\0{of_ranks}=".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return pid


def _say_below_torchrun(text: str) -> None:
    """Leave the printing to a process that outlives this rank.

    The shell detaches it at once: a child of this rank would be ended together with the rank's other children.
    """
    if (torchrun := launcher_pid()) == 1:
        return  # torchrun has died before its ranks, or everything ends together with it because it is a container's process 1
    words = [sys.executable, "-S", "-I", "-c", _SAY_AFTER, str(torchrun), in_utf8(text)]
    with suppress(OSError):  # no memory, or no /proc: the text stands above torchrun's report then
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {SPEAKS_LAST: "1"},
            start_new_session=True,
            check=False,
        )


def say_after(pid: int, text: str) -> None:
    """Wait until that process has ended, then print on its standard error.

    Print nothing if it is still there after TORCHRUN_SECONDS: the text has been printed once already.
    """
    screen = screen_of(pid)  # while the process is still there
    with suppress(ProcessLookupError):  # it has ended already
        if not select.select([os.pidfd_open(pid)], [], [], TORCHRUN_SECONDS)[0]:
            return
    say(text, screen)


def launch_folder() -> Path | None:
    """Return the folder of the launch/torchrun.py that started this rank; None if something else did."""
    given = os.environ.get(LAUNCH_FOLDER, "")
    return Path(given) if given and is_own_folder(Path(given)) else None


def report_of(run: Path, launcher: str) -> Path:
    """Return the file of a run directory in which a launcher (World.launcher) keeps torchrun's own report."""
    return run / f"torchrun-{launcher}.log"


def tell_report(file: Path) -> None:
    """Tell the launcher in which file of the run directory to keep torchrun's own report."""
    if folder := launch_folder():
        (folder / _REPORT).write_text(str(file), encoding="utf-8")


def told_report(folder: Path) -> Path | None:
    """Return the file that tell_report() named, or None if the ranks ended before they called it."""
    file = folder / _REPORT
    return Path(file.read_text(encoding="utf-8")) if file.exists() else None


def tell_said() -> None:
    """Tell the launcher that the screen says why the run ends."""
    if folder := launch_folder():
        with suppress(OSError):  # a full disk
            (folder / _SAID).touch()


def is_said(folder: Path) -> bool:
    return (folder / _SAID).exists()


def hold_launcher() -> int | None:
    """Return a descriptor; until all processes that have it are gone, the launcher stays. None without our launcher."""
    if not (folder := launch_folder()):
        return None
    descriptor = os.open(folder / _WATCHDOG, os.O_WRONLY | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def wait_until_free(folder: Path, seconds: float) -> None:
    """Wait until nothing holds the launcher, for so many seconds at most."""
    until, file = time.monotonic() + seconds, folder / _WATCHDOG
    if not file.exists():
        return
    with file.open("w") as held:
        while time.monotonic() < until:
            with suppress(BlockingIOError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(POLL_SECONDS)
