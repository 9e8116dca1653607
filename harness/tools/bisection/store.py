"""Environments on disk, each whole or absent: made under a lock, marked when complete, the least recently used removed first.

`uv run --isolated` is no substitute: its environments end with the command, while the runs of a --repeat, the probe, the
report's diff and a resumed bisect all need one that stays; and uv has no limit for what they take.
"""

import errno
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from harness.runtime.units import GIB

_MARK = "complete.json"


class Pause(Exception):
    """The candidate is not at fault, but the bisect cannot continue now, for want of network or disk; one sentence."""


class Unreachable(Pause):
    """A package index does not answer; it may a few minutes later."""


class NoDisk(Pause):
    """The disk is full."""


Fill = Callable[[Path, int], None]
"""Fills an empty folder, given also the descriptor of the lock that its processes must inherit."""


def default_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "harness-bisect"


@dataclass
class Store:
    """A folder of environments, shared by any number of bisects of this host at once."""

    root: Path
    limit_bytes: int
    _locks: dict[str, IO[str]] = field(default_factory=dict)

    def ensure(self, key: str, fill: Fill) -> Path:
        """Return the folder, complete; it stays until release(key).

        Another process that makes the same one waits. What a killed process left is removed. Raises Pause without disk.
        """
        folder = self.root / key
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with ExitStack() as until_complete:
                lock = until_complete.enter_context((self.root / f"{key}.lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
                if self.facts(key):
                    os.utime(folder / _MARK)
                else:
                    self.evict(max(self._sizes().values(), default=0))  # the next may need as much as the largest
                    self._fill(folder, fill, lock.fileno())
                fcntl.flock(lock, fcntl.LOCK_SH)
                self._locks[key] = lock
                until_complete.pop_all()
            self.evict(0)
        except OSError as error:
            raise Pause(f"the store {self.root} cannot be written: {error.strerror or error}.") from error
        return folder

    def _fill(self, folder: Path, fill: Fill, lock: int) -> None:
        """Fill it; if the disk is full, once more without what no run needs."""
        while True:
            if folder.exists():
                shutil.rmtree(folder)
            try:
                folder.mkdir()
                fill(folder, lock)
                write_json(folder / _MARK, {"bytes": _folder_bytes(folder)})
                return
            except (OSError, NoDisk) as error:
                shutil.rmtree(folder, ignore_errors=True)
                full = getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT)
                if not (full or isinstance(error, NoDisk)) or not self.evict(sys.maxsize):
                    raise

    def facts(self, key: str) -> dict[str, Any]:
        """Return the bytes of a complete environment, and when it was last used; nothing for any other."""
        mark = self.root / key / _MARK
        with suppress(FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
            return {**json.loads(mark.read_text()), "used": mark.stat().st_mtime}
        return {}

    def describe(self) -> str:
        sizes = self._sizes()
        used, limit = (each / GIB for each in (sum(sizes.values()), self.limit_bytes))
        return f"environments in {self.root} (--store): {len(sizes)}, {used:.1f} GiB of at most {limit:g} GiB (--store-gib)"

    def release(self, key: str) -> None:
        if lock := self._locks.pop(key, None):
            lock.close()

    def evict(self, room: int) -> bool:
        """Remove what no bisect uses until the rest is under the limit and `room` bytes of the disk are free.

        Return whether anything was removed.
        """
        sizes = self._sizes()
        total, removed = sum(sizes.values()), False
        for mark in sorted(sizes, key=lambda file: self.facts(file.parent.name).get("used", 0.0)):
            if total <= self.limit_bytes and shutil.disk_usage(self.root).free >= room:
                break
            with (self.root / f"{mark.parent.name}.lock").open("w") as lock, suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mark.unlink(missing_ok=True)  # first, so that half of it is never taken for all of it
                shutil.rmtree(mark.parent, ignore_errors=True)
                total -= sizes[mark]
                removed = True
        return removed

    def _sizes(self) -> dict[Path, int]:
        return {mark: self.facts(mark.parent.name).get("bytes", 0) for mark in self.root.glob(f"*/{_MARK}")}


def _folder_bytes(folder: Path) -> int:
    """Return the bytes of the files, one that is linked twice counted once."""
    found = [os.lstat(os.path.join(parent, name)) for parent, _, files in os.walk(folder) for name in files]
    return sum({(each.st_dev, each.st_ino): each.st_size for each in found}.values())


def write_json(file: Path, value: Any) -> None:
    """Write all of it or nothing, also if the machine stops. Raises OSError."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.new")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            json.dump(value, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
