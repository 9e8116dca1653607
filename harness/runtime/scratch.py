"""A private folder for the temporary files of a run, or of one engine: SGLang makes sockets there and removes none."""

import multiprocessing
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

SHARED = "HARNESS_TMPDIR"
"""Variable: the folder for temporary files as it was before any of the run's own, the same for all processes of a host."""
LONGEST_SOCKET = 107
"""Bytes of the path of a Unix socket, its final zero not counted."""
_OF_ENGINE = len("/e12345678/torch-shm-dir-123456/manager.sock")
"""An engine's own folder, and the longest path that is made in it."""


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


def remove_what_exit_would() -> None:
    """Remove multiprocessing's folder of sockets, for a process that leaves without Python's exit."""
    folder = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def shared() -> Path:
    """Return the folder in which ranks and schedulers of one host find each other's files."""
    return Path(os.environ.get(SHARED) or tempfile.gettempdir())


def shared_for_sockets(below: int) -> Path:
    """Return shared(), or /tmp where that is too long for a socket this many bytes below it."""
    return Path(_base(below, str(shared())))


def engine_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new folder (0700) for one engine; it is removed with this process's end, at the latest."""
    return tempfile.TemporaryDirectory(prefix="e", dir=_base(_OF_ENGINE), ignore_cleanup_errors=True)


def variables(folder: Path) -> Mapping[str, str]:
    """Return the environment of a process whose temporary files are to be made there."""
    cache = str(shared() / f"torchinductor_{psutil.Process().username()}")  # torch's own default
    return {
        "TMPDIR": str(folder),
        SHARED: str(shared()),
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", cache),
    }


def _prefix(name: str) -> str:
    return f"{name}.tmp-"


def _base_of_run(name: str) -> str:
    return _base(len(f"/{_prefix(name)}12345678") + _OF_ENGINE)


def _base(below: int, base: str | None = None) -> str:
    """Return the folder for temporary files, or /tmp where that is too long for a socket this many bytes below it."""
    base = base or tempfile.gettempdir()
    return base if len(os.fsencode(base)) + below <= LONGEST_SOCKET else "/tmp"
