"""Wheels in local folders, which may be built again under the same name, with other content.

Environments are kept by what the wheels hold. uv needs to be told, because it caches the wheels of a folder by their names.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

from packaging.utils import canonicalize_name
from packaging.version import Version

from harness.tools.bisection.candidates import is_build_of, parse_filename


@dataclass(frozen=True)
class LocalBuilds:
    """The files in local folders that uv may install for some pins: file -> digest of its content."""

    content: Mapping[Path, str]
    notes: Path
    """A folder with a file for each wheel: the digest of what uv's cache has of it."""

    def key(self) -> str:
        """Return what an environment made of them is kept by."""
        return " ".join(f"{file.name}={digest}" for file, digest in self.content.items())

    def refresh(self, sources: Sequence[str]) -> list[str]:
        """Return uv's arguments to read those again of which its cache may have an older build.

        uv refuses to do so with UV_OFFLINE. Without an index that variable does no good, and installation leaves it out.
        """
        if os.environ.get("UV_OFFLINE") and "--no-index" not in sources:
            return []
        changed = [file for file, digest in self.content.items() if self._noted(file) != digest]
        names = dict.fromkeys(parse_filename(file.name)[0] for file in changed)
        return [word for name in names for word in ("--refresh-package", name)]

    def note(self) -> None:
        """Note that uv has installed them."""
        self.notes.mkdir(parents=True, exist_ok=True)
        for file, digest in self.content.items():
            self._note_of(file).write_text(digest)

    def _noted(self, file: Path) -> str:
        note = self._note_of(file)
        return note.read_text() if note.is_file() else ""

    def _note_of(self, file: Path) -> Path:
        cached = f"{os.environ.get('UV_CACHE_DIR', '')}\n{file}"
        return self.notes / hashlib.sha256(cached.encode()).hexdigest()


def find_builds(store: Path, sources: Sequence[str], pins: Mapping[str, str]) -> LocalBuilds:
    """Return the builds of these pins. sources: uv's arguments. pins: package -> version."""
    wanted = {str(canonicalize_name(name)): Version(version) for name, version in pins.items()}
    folders = [unquote(value.removeprefix("file://")) for word, value in pairwise(sources) if word == "--find-links"]
    found = {}
    for file in sorted(each for folder in folders for each in Path(folder).glob("*")):
        name, version = parse_filename(file.name)
        if version and name in wanted and is_build_of(version, wanted[name]):
            status = file.stat()
            found[file] = _digest_of_file(file, status.st_ino, status.st_mtime_ns, status.st_size)
    return LocalBuilds(found, store / "builds")


@cache
def _digest_of_file(file: Path, *_status: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
