"""Environments on disk, each whole or not there: made under a lock, marked when complete, the least recently used removed."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

_MARK = "complete.json"


class Pause(Exception):
    """Nothing is wrong with the candidate, but it cannot go on now, for want of network or disk; one sentence."""


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
                if folder.exists():
                    shutil.rmtree(folder)
                self.evict(0)
                folder.mkdir()
                facts = make(folder, lock.fileno())
                facts["bytes"] = size(folder)
                write_json(folder / _MARK, facts)
                fcntl.flock(lock, fcntl.LOCK_SH)
                self._held[key] = lock
                self.evict(0)
            else:
                os.utime(folder / _MARK)
                fcntl.flock(lock, fcntl.LOCK_SH)
                self._held[key] = lock
        except OSError as error:
            raise Pause(f"the store {self.root} cannot be written: {error.strerror or error}.") from error
        return folder, facts

    def facts(self, key: str) -> dict[str, Any] | None:
        """What `make` returned; None where it is not complete."""
        try:
            facts: dict[str, Any] = json.loads((self.root / key / _MARK).read_text())
        except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
            return None
        return facts

    def release(self, key: str) -> None:
        """It may be removed from now on."""
        if lock := self._held.pop(key, None):
            lock.close()

    def evict(self, room: int) -> None:
        """Remove what nobody holds, least recently used first, until `room` bytes more would fit under the limit."""
        marks = sorted(self.root.glob(f"*/{_MARK}"), key=_modified)
        sizes = {mark: (self.facts(mark.parent.name) or {}).get("bytes", 0) for mark in marks}
        total = sum(sizes.values())
        for mark in marks:
            if total + room <= self.limit_bytes:
                return
            with self._unused(mark.parent.name) as free:
                if free:
                    mark.unlink(missing_ok=True)  # first, so that half of it is never taken for all of it
                    shutil.rmtree(mark.parent, ignore_errors=True)
                    total -= sizes[mark]

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


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return time.time()
