"""The folder in which launch/torchrun.py and the ranks that it starts tell each other how their run ends.

launch/torchrun.py keeps torchrun's own report off the screen, so nothing needs to be said again below it. It returns
only when the watchdog of its host has ended and said everything. Under torchrun itself there is no such folder.
"""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from harness.runtime.files import is_own_folder

VARIABLE = "HARNESS_LAUNCH"
POLL_SECONDS = 0.05
_REPORT, _SAID, _WATCHDOG = "report", "said", "watchdog"


def launch_folder() -> Path | None:
    """Return the folder of the launch/torchrun.py that started this rank; None if something else did."""
    given = os.environ.get(VARIABLE, "")
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
