"""Environments on disk, each whole or not there: made under a lock, marked when complete, the least recently used removed."""

import errno
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

_MARK = "complete.json"


class Pause(Exception):
    """Nothing is wrong with the candidate, but it cannot go on now, for want of network or disk; one sentence."""


class Unreachable(Pause):
    """A package index does not answer; it may a few minutes later."""


class NoDisk(Pause):
    """The disk is full."""


Make = Callable[[Path, int], dict[str, Any]]
"""Fills an empty folder, given also the descriptor of the lock that whatever works for it must inherit; returns facts."""


def default_root() -> Path:
    """Where environments are kept unless --store says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "harness-bisect"


@dataclass
class Store:
    """A folder of environments, shared by any number of bisects of this host at once."""

    root: Path
    limit_bytes: int
    _held: dict[str, IO[str]] = field(default_factory=dict)

    def ensure(self, key: str, make: Make) -> tuple[Path, dict[str, Any]]:
        """The folder and its facts, made first where it is not complete; it stays until release(key).

        Another process that makes the same waits. What a killed process left is thrown away. Raises Pause without disk.
        """
        folder = self.root / key
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock = (self.root / f"{key}.lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
            facts = self.facts(key)
            if facts is None:
                self.evict(self._largest())
                facts = self._filled(folder, make, lock.fileno())
                fcntl.flock(lock, fcntl.LOCK_SH)
                self._held[key] = lock
                self.evict()
            else:
                os.utime(folder / _MARK)
                fcntl.flock(lock, fcntl.LOCK_SH)
                self._held[key] = lock
        except OSError as error:
            raise Pause(f"the store {self.root} cannot be written: {error.strerror or error}.") from error
        return folder, facts

    def _filled(self, folder: Path, make: Make, lock: int) -> dict[str, Any]:
        """Its facts, once it is whole. Where the disk is full, it is made once more without what no run needs."""
        while True:
            if folder.exists():
                shutil.rmtree(folder)
            try:
                folder.mkdir()
                facts = make(folder, lock)
                facts["bytes"] = size(folder)
                write_json(folder / _MARK, facts)
                return facts
            except (OSError, NoDisk) as error:
                shutil.rmtree(folder, ignore_errors=True)
                if not _is_full(error) or not self.evict(sys.maxsize):
                    raise

    def facts(self, key: str) -> dict[str, Any] | None:
        """What `make` returned; None where it is not complete."""
        try:
            facts: dict[str, Any] = json.loads((self.root / key / _MARK).read_text())
        except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
            return None
        return facts

    def shown(self) -> str:
        """Where it is and how big."""
        sizes = self._sizes()
        used, limit = (each / (1 << 30) for each in (sum(sizes.values()), self.limit_bytes))
        return f"environments in {self.root} (--store): {len(sizes)}, {used:.1f} GiB of at most {limit:g} GiB (--store-gib)"

    def release(self, key: str) -> None:
        """It may be removed from now on."""
        if lock := self._held.pop(key, None):
            lock.close()

    def evict(self, room: int = 0) -> bool:
        """Remove what no bisect holds, least recently used first, until the rest is under the limit and `room` bytes of the disk
        are free. Return whether anything was removed."""
        sizes = self._sizes()
        total, removed = sum(sizes.values()), False
        for mark in sorted(sizes, key=_modified):
            if total <= self.limit_bytes and shutil.disk_usage(self.root).free >= room:
                break
            with self._unused(mark.parent.name) as free:
                if free:
                    mark.unlink(missing_ok=True)  # first, so that half of it is never taken for all of it
                    shutil.rmtree(mark.parent, ignore_errors=True)
                    total -= sizes[mark]
                    removed = True
        return removed

    def _sizes(self) -> dict[Path, int]:
        """Bytes of each environment, by its mark."""
        return {mark: (self.facts(mark.parent.name) or {}).get("bytes", 0) for mark in self.root.glob(f"*/{_MARK}")}

    def _largest(self) -> int:
        """Bytes that the next environment may need, for all that is known before it is made."""
        return max(self._sizes().values(), default=0)

    @contextmanager
    def _unused(self, key: str) -> Iterator[bool]:
        with (self.root / f"{key}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True


def size(folder: Path) -> int:
    """Bytes of the files, one that is linked twice counted once."""
    seen: dict[tuple[int, int], int] = {}
    for parent, _, files in os.walk(folder):
        for name in files:
            found = os.lstat(os.path.join(parent, name))
            seen[found.st_dev, found.st_ino] = found.st_size
    return sum(seen.values())


def write_json(file: Path, value: Any) -> None:
    """All of it or nothing, also if the machine stops. Raises OSError."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.new")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            json.dump(value, stream, indent=1)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _is_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error)
    return isinstance(error, NoDisk)


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return time.time()
