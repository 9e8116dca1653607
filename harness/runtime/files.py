"""Files that others cannot tamper with: replaced whole, read only if they are regular files, in private folders.

Each rank of a run, and each engine, has a folder of its own for temporary files. SGLang makes sockets in its temporary
folder and removes none of them.
"""

import multiprocessing
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

SHARED = "HARNESS_TMPDIR"
"""Environment variable with the folder for temporary files from before the run made its own, the same for a whole
host."""
LONGEST_SOCKET = 107
"""The most bytes that the path of a Unix socket can have, without its final zero."""
OF_ENGINE = len("/e12345678/torch-shm-dir-123456/manager.sock")
"""Bytes of an engine's folder and the longest path made in it. A channel's sockets are shorter."""


def replace_file(file: Path, text: str | Iterable[str]) -> None:
    """Write a file under another name and rename it: a reader sees the old file or the whole new one.

    Nothing is followed: not a link of the file's name, which is replaced, and not one of the other name, which is new
    and not to be guessed. Only the user can read the file.
    """
    descriptor, part = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.", suffix=".part")
    try:
        with open(descriptor, "w", encoding="utf-8") as output:
            output.writelines([text] if isinstance(text, str) else text)
        os.replace(part, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise


def is_regular(file: Path) -> bool:
    """Return whether this is a file, and not a link, a pipe or a device, from which a read may never end."""
    try:
        return stat.S_ISREG(file.lstat().st_mode)
    except OSError:
        return False


def is_own_folder(folder: Path) -> bool:
    """Return whether this is a folder of this user, and not a link, into which nobody else can put files."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def remove_what_exit_would() -> None:
    """Remove multiprocessing's folder of sockets. Call it in a process that ends without Python's exit handlers."""
    folder = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def shared_folder() -> Path:
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
    os.environ |= variables_of_folder(folder)
    tempfile.tempdir = str(folder)
    return folder


def make_run_folder(name: str) -> Path:
    """Make a new folder (0700) of the run, in which the path of a Unix socket is not too long."""
    return Path(tempfile.mkdtemp(prefix=_prefix(name), dir=_base_of_run(name)))


def run_folders(name: str) -> list[Path]:
    return [each for each in Path(_base_of_run(name)).glob(f"{_prefix(name)}*") if is_own_folder(each)]


def remove_run_folders(name: str) -> None:
    """Remove this user's folders of the run, from a process that makes no more temporary files."""
    for folder in run_folders(name):
        shutil.rmtree(folder, ignore_errors=True)  # a process that is ending removes its own


def variables_of_folder(folder: Path) -> Mapping[str, str]:
    """Return the environment of a process that makes its temporary files there.

    Compiled kernels stay where torch keeps them, because later runs use them again. torch runs what it finds there, so
    a folder that somebody else made under this name is not used.
    """
    import psutil  # not above: what starts on a bare Python imports this file

    cache = shared_folder() / f"torchinductor_{psutil.Process().username()}"  # torch's own default
    with suppress(OSError):  # it exists, or cannot be made
        cache.mkdir(0o700)
    return {
        "TMPDIR": str(folder),
        SHARED: str(shared_folder()),
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
    return base_for(len(f"/{_prefix(name)}12345678") + OF_ENGINE, str(shared_folder()))
