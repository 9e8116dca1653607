"""A private folder for the temporary files of an engine: SGLang makes sockets there and removes none."""

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

SHARED = "HARNESS_TMPDIR"
"""Variable: the folder for temporary files as it was before any of the run's own, the same for all processes of a host."""
LONGEST_SOCKET = 107
"""Bytes of the path of a Unix socket, its final zero not counted."""
OF_ENGINE = len("/e12345678/torch-shm-dir-123456/manager.sock")
"""An engine's own folder, and the longest path that is made in it."""


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
    return Path(base_for(below, str(shared())))


def engine_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new folder (0700) for one engine; it is removed with this process's end, at the latest."""
    return tempfile.TemporaryDirectory(prefix="e", dir=base_for(OF_ENGINE), ignore_cleanup_errors=True)


def variables(folder: Path) -> Mapping[str, str]:
    """Return the environment of a process whose temporary files are to be made there."""
    cache = str(shared() / f"torchinductor_{psutil.Process().username()}")  # torch's own default
    return {
        "TMPDIR": str(folder),
        SHARED: str(shared()),
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", cache),
    }


def base_for(below: int, base: str | None = None) -> str:
    """Return the folder for temporary files, or /tmp where that is too long for a socket this many bytes below it."""
    base = base or tempfile.gettempdir()
    return base if len(os.fsencode(base)) + below <= LONGEST_SOCKET else "/tmp"
