"""Private folders for temporary files: one for each rank of a run, and one for each engine.

SGLang makes sockets in its temporary folder and removes none of them.
"""

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from harness.runtime.files import is_own_folder

SHARED = "HARNESS_TMPDIR"
"""Environment variable with the folder for temporary files from before the run made its own, the same for a whole
host."""
LONGEST_SOCKET = 107
"""The most bytes that the path of a Unix socket can have, without its final zero."""
OF_ENGINE = len("/e12345678/torch-shm-dir-123456/manager.sock")
"""Bytes of an engine's folder and the longest path made in it. A channel's sockets are shorter."""


def remove_what_exit_would() -> None:
    """Remove multiprocessing's folder of sockets. Call it in a process that ends without Python's exit handlers."""
    folder = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def shared() -> Path:
    """Return the folder in which the ranks of one launcher find each other's folders."""
    return Path(os.environ.get(SHARED) or tempfile.gettempdir())


def engine_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new folder (0700) for one engine. It is removed when this process ends, at the latest."""
    return tempfile.TemporaryDirectory(prefix="e", dir=base_for(OF_ENGINE), ignore_cleanup_errors=True)


def enter_run_folder(name: str) -> Path:
    """Make a new folder (0700) and use it for all later temporary files of this process and of those that it starts.

    name: the run on this host, by which run_folders() finds the folder.
    """
    folder = make_run_folder(name)
    os.environ |= variables(folder)
    tempfile.tempdir = str(folder)
    return folder


def make_run_folder(name: str) -> Path:
    """Make a new folder (0700) of the run, in which the path of a Unix socket is not too long."""
    return Path(tempfile.mkdtemp(prefix=_prefix(name), dir=_base_of_run(name)))


def run_folders(name: str) -> list[Path]:
    """Return this user's folders of the run."""
    return [each for each in Path(_base_of_run(name)).glob(f"{_prefix(name)}*") if is_own_folder(each)]


def remove_run_folders(name: str) -> None:
    """Remove this user's folders of the run, from a process that makes no more temporary files."""
    for folder in run_folders(name):
        shutil.rmtree(folder, ignore_errors=True)  # a process that is ending removes its own


def variables(folder: Path) -> Mapping[str, str]:
    """Return the environment of a process that makes its temporary files there.

    Compiled kernels stay where torch keeps them, because later runs use them again. torch runs what it finds there, so
    a folder that somebody else made under this name is not used.
    """
    cache = shared() / f"torchinductor_{psutil.Process().username()}"  # torch's own default
    with suppress(OSError):  # it exists, or cannot be made
        cache.mkdir(0o700)
    return {
        "TMPDIR": str(folder),
        SHARED: str(shared()),
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        or str(cache if is_own_folder(cache) else folder / "torchinductor"),
    }


def base_for(below: int, base: str | None = None) -> str:
    """Return the folder for temporary files, or /tmp if that is too long for a socket whose path has this many more
    bytes.
    """
    base = base or tempfile.gettempdir()
    return base if len(os.fsencode(base)) + below <= LONGEST_SOCKET else "/tmp"


def _prefix(name: str) -> str:
    return f"{name}.tmp-"


def _base_of_run(name: str) -> str:
    # Not tempfile's own: a rank that has a folder of the run, and removes those of others, would look in its own.
    return base_for(len(f"/{_prefix(name)}12345678") + OF_ENGINE, str(shared()))
