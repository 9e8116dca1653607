"""What can be run: an ordered list of versions or commits between two ends."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from harness.tools.bisection.question import WrongQuestion

_NAMED_VERSION = re.compile(r"(?:.*?[-_])??v?(\d+(?:\.\w+)+(?:[.+-]\w+)*)", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One version or commit."""

    name: str
    """The version, or the commit's full hash."""
    title: str = ""
    """A commit's subject."""
    time: str = ""
    """When it was published or committed, in ISO 8601; "" where that is not known."""
    requires_python: str = ""
    folder: str = ""
    """Of an environment that was made before."""
    yanked: bool = False
    """Withdrawn by its publisher: a candidate only where it is asked for, as an end."""

    @property
    def shown(self) -> str:
        """A version, or the first twelve digits of a hash with the subject."""
        return f"{self.name[:12]} {self.title}" if self.title else self.name

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def between(
    found: Mapping[Version, Candidate], older: str, newer: str, *, pre_releases: bool, of: str
) -> list[Candidate]:
    """The versions from `older` to `newer`, both included. Raises WrongQuestion."""
    low, high = (_end(found, text, of) for text in (older, newer))
    return [
        found[version]
        for version in sorted(found)
        if version in (low, high)
        or (low < version < high and not found[version].yanked and (pre_releases or not version.is_prerelease))
    ]


def _end(found: Mapping[Version, Candidate], text: str, of: str) -> Version:
    try:
        version = Version(text)
    except InvalidVersion as error:
        raise WrongQuestion(f"{text!r} is not a version; give one such as 0.5.9 or 0.5.5.post3.") from error
    if version not in found:
        kept = sorted(each for each in found if not found[each].yanked)
        below = [str(each) for each in kept if each < version][-2:]
        above = [str(each) for each in kept if each > version][:2]
        near = ", ".join(below + above) or "none at all"
        raise WrongQuestion(f"{of} has no version {text}; nearest are {near}.")
    return version


def check_order(older: str, newer: str, find_fix: bool) -> None:
    """Raises WrongQuestion where the older end is the newer one. Versions only."""
    try:
        low, high = Version(older), Version(newer)
    except InvalidVersion as error:
        raise WrongQuestion(f"{error}; give a version such as 0.5.9 or 0.5.5.post3.") from error
    if low == high:
        raise WrongQuestion(f"good and bad are both {older}; give two ends that differ.")
    if low > high:
        if find_fix:
            raise WrongQuestion(
                f"with --find-fix the bad end is the older one, but bad = {older} is newer than good = {newer}."
            )
        raise WrongQuestion(
            f"good = {older} is newer than bad = {newer}; exchange them, or ask with --find-fix which release made it good."
        )


def in_wheels(folder: Path, package: str) -> dict[Version, Candidate]:
    """The versions of the package whose wheels lie in the folder."""
    found = {}
    for file in sorted(folder.glob("*.whl")):
        try:
            name, version, _, _ = parse_wheel_filename(file.name)
        except InvalidWheelFilename:
            continue
        if name == canonicalize_name(package):
            found[version] = Candidate(name=str(version), requires_python=_requires_python(file))
    if not found:
        raise WrongQuestion(f"{folder} has no wheel of {package}.")
    return found


def _requires_python(wheel: Path) -> str:
    try:
        with ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            for line in archive.read(name).decode(errors="replace").splitlines():
                if not line:
                    break
                if line.lower().startswith("requires-python:"):
                    return line.partition(":")[2].strip()
    except (BadZipFile, StopIteration, OSError):
        return ""  # the install will say what is wrong with it
    return ""


def in_environments(folder: Path) -> dict[Version, Candidate]:
    """One for each subfolder whose name is or ends in a version, such as 0.5.12, site-0.5.12 or sglang-0.5.12.post1."""
    found: dict[Version, Candidate] = {}
    for entry in sorted(folder.iterdir()):
        match = _NAMED_VERSION.fullmatch(entry.name)
        if not entry.is_dir() or not match:
            continue
        try:
            version = Version(match[1])
        except InvalidVersion:
            continue
        if version in found:
            raise WrongQuestion(
                f"{folder} has two folders of {version}: {Path(found[version].folder).name} and {entry.name}."
            )
        found[version] = Candidate(name=str(version), folder=str(entry))
    if not found:
        raise WrongQuestion(f"{folder} has no subfolder whose name is a version, such as 0.5.12.")
    return found


def names(candidates: Iterable[Candidate], most: int = 8) -> str:
    """For a sentence."""
    listed: Sequence[str] = [each.shown for each in candidates]
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
