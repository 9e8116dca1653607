"""A private folder for the temporary files of a run on one host, which the watchdog removes when all has ended."""

import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from harness.runtime.scratch import OF_ENGINE, base_for, variables


def enter(name: str) -> Path:
    """Make a new folder (0700) the one of all later temporary files of this process, and of those that it starts.

    name: of the run on this host, by which remove finds it. Compiled kernels stay where torch keeps them.
    """
    folder = Path(tempfile.mkdtemp(prefix=_prefix(name), dir=_base_of_run(name)))
    os.environ |= variables(folder)
    tempfile.tempdir = str(folder)
    return folder


def remove(name: str) -> None:
    """Remove this user's folders of the run, in a process that has not entered one; what cannot be removed stays."""
    for folder in Path(_base_of_run(name)).glob(f"{_prefix(name)}*"):
        with suppress(FileNotFoundError):  # a process that is ending removes its own
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)


def _prefix(name: str) -> str:
    return f"{name}.tmp-"


def _base_of_run(name: str) -> str:
    return base_for(len(f"/{_prefix(name)}12345678") + OF_ENGINE)
