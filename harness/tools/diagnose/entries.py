"""The catalogue of known failures: one TOML file each in catalogue/, read strictly.

A signature's role: "cause", seen in this failure alone; "likely", seen in it as a rule; "hint", seen in it, in others, or
in healthy runs; "excludes", seen where it is another failure. How they add up to a confidence is said in diagnose.py.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from harness.tools.diagnose.patterns import Pattern

FOLDER = Path(__file__).with_name("catalogue")
SURROUNDINGS = Path(__file__).with_name("surroundings.toml")

Role = Literal["cause", "likely", "hint", "excludes"]
ReproClass = Literal["cpu", "one_gpu", "several_gpus", "hosts"]
UNKNOWN = "unknown"
OF_SGLANG = "rl"
"""The context of a trainer that runs no other engine than SGLang."""
_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class CatalogueError(ValueError):
    """A file of the catalogue is wrong."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What one line of a log shows."""

    role: Role
    pattern: Pattern
    near: Pattern | None = None
    """What another line must show, at most NEAR_LINES away in the same file, and of the same process where that is known."""
    anywhere: str = ""
    """Why it counts without the entry's context: no other program can print it."""


@dataclass(frozen=True, kw_only=True)
class Affected:
    """Releases of one package in which it was seen or must be; "unknown" where nobody has looked."""

    package: str
    first: str
    last: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Repro:
    """The smallest way to have it: what it needs, and does."""

    needs: ReproClass
    does: str
    no_case: str = ""
    """Why launch/repro.py has no case of it, in one sentence; left out where it has."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One measurement."""

    versions: Mapping[str, str]
    date: str
    device: str
    result: str


@dataclass(frozen=True, kw_only=True)
class Example:
    """Lines of a log, and who saw them."""

    source: str
    """measured: what ran; reported: URL of the page that has these lines; source: a program whose source has the message
    (a time stamp before it is made up); harness: our module that says it; signature: lines put together around a quoted part."""
    log: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One known failure."""

    slug: str
    title: str
    phases: tuple[str, ...]
    """Of harness/runtime/phases.py, in which it shows."""
    cause: str
    fix: str
    signatures: tuple[Signature, ...]
    affected: tuple[Affected, ...]
    repro: Repro
    examples: tuple[Example, ...]
    context: tuple[str, ...]
    """Names of surroundings.toml, one of which the log must show: the same sentence of another program is another failure."""
    conditions: tuple[Pattern, ...] | None = None
    """What a log must show beside a cause before the name is certain; none: the sentence says it all. Left out: a log
    cannot show all that makes it this failure, so that the name is never certain."""
    links: tuple[str, ...] = ()
    consequence: bool = False
    """It follows from something else: named only where nothing else is known."""
    seen: tuple[Seen, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What logs have beside signatures."""

    contexts: Mapping[str, tuple[Pattern, ...]]
    harmless: tuple[Pattern, ...]
    """Lines that look like a failure and are none."""
    wrappers: tuple[Pattern, ...]
    """Exceptions that only say that another process, or another exception, failed."""
    other_engines: tuple[Pattern, ...]
    """Rollout engines that are not SGLang: a trainer that runs one of them is no context."""
    other_engine_packages: tuple[str, ...]
    """Their packages: an exception with frames of one, and none of SGLang's, is theirs."""
    trainer_packages: tuple[str, ...]
    """Packages and folders of trainers that run SGLang."""


@cache
def catalogue(folder: Path = FOLDER) -> Mapping[str, Entry]:
    """All entries by slug, in alphabetical order. Raises CatalogueError."""
    entries = [read_entry(file) for file in sorted(folder.glob("*.toml"))]
    known = {*surroundings().contexts, OF_SGLANG}
    for entry in entries:
        if unknown := set(entry.context) - known:
            raise CatalogueError(f"{entry.slug}: context = {sorted(unknown)} is not in {SURROUNDINGS.name}")
    return {entry.slug: entry for entry in entries}


@cache
def surroundings(file: Path = SURROUNDINGS) -> Surroundings:
    """Raises CatalogueError."""
    made: Surroundings = _made(Surroundings, tomllib.loads(file.read_text(encoding="utf-8")), file.name)
    return made


def read_entry(file: Path) -> Entry:
    """Raises CatalogueError, naming file and key."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise CatalogueError(f"{file.name}: {error}") from error
    entry: Entry = _made(Entry, values, file.name)
    if entry.slug != file.stem or not _SLUG.fullmatch(entry.slug):
        raise CatalogueError(f"{file.name}: slug = {entry.slug!r} must be the file's name, of a-z, 0-9 and -")
    for name in ("phases", "affected", "examples", "context"):
        if not getattr(entry, name):
            raise CatalogueError(f"{file.name}: {name} is empty, but must have one at least")
    if not any(signature.role in ("cause", "likely") for signature in entry.signatures):
        raise CatalogueError(f"{file.name}: signatures has no cause and no likely one, so it would never be named")
    if wrong := [link for link in entry.links if not link.startswith("https://")]:
        raise CatalogueError(f"{file.name}: links = {wrong} must be https:// addresses")
    return entry


def _made(kind: Any, value: Any, where: str) -> Any:
    """The value of a TOML file as that type. Raises CatalogueError."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return _made(arguments[0], value, where)
    if kind is Pattern:
        try:
            pattern = Pattern(_made(str, value, where))
            assert pattern.regex and pattern.word
        except (ValueError, re.error) as error:
            raise CatalogueError(f"{where}: {error}") from error
        return pattern
    if origin is Literal:
        if value not in arguments:
            raise CatalogueError(f"{where} = {value!r} must be one of {', '.join(arguments)}")
        return value
    if origin is tuple:
        return tuple(
            _made(arguments[0], each, f"{where}[{index}]") for index, each in enumerate(_a(list, value, where))
        )
    if origin is Mapping:
        return {key: _made(arguments[1], each, f"{where}.{key}") for key, each in _a(dict, value, where).items()}
    if hasattr(kind, "__dataclass_fields__"):
        return _made_dataclass(kind, _a(dict, value, where), where)
    made = _a(kind, value, where)
    if kind is str and not made.strip():
        raise CatalogueError(f"{where} is empty; leave it out, or say {UNKNOWN}")
    return made


def _made_dataclass(kind: Any, values: Mapping[str, Any], where: str) -> Any:
    hints = get_type_hints(kind)
    if unknown := sorted(set(values) - set(hints)):
        raise CatalogueError(f"{where}: {', '.join(unknown)} is unknown; the keys are {', '.join(hints)}")
    needed = {field.name for field in fields(kind) if field.default is MISSING}
    if missing := sorted(needed - set(values)):
        raise CatalogueError(f"{where}: {', '.join(missing)} is missing")
    return kind(**{key: _made(hints[key], value, f"{where}: {key}") for key, value in values.items()})


def _a(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, kind):
        raise CatalogueError(f"{where} = {value!r} must be of type {kind.__name__}")
    return value
