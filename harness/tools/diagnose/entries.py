"""The catalogue of known failures: one TOML file for each in catalogue/, read strictly, and patterns for large logs.

A pattern is a regular expression, matched without regard to case. Each must have whole words that every match contains, so
that only lines with all of them are searched: its first and last words count as whole ones, and a dot stands between words.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

FOLDER = Path(__file__).with_name("catalogue")
SURROUNDINGS = Path(__file__).with_name("surroundings.toml")

Role = Literal["cause", "likely", "hint", "excludes"]
"""cause: seen in this failure alone; likely: usually; hint: in others and in healthy runs too; excludes: in others alone."""
ReproClass = Literal["cpu", "one_gpu", "several_gpus", "hosts"]
UNKNOWN = "unknown"
OF_SGLANG = "rl"
"""The context of a trainer that runs no other engine than SGLang."""
_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

_WORD_BYTES = b"abcdefghijklmnopqrstuvwxyz0123456789_"
_LOWER = bytes(range(256)).lower()
TABLE = bytes(lower if lower in _WORD_BYTES else 32 for lower in _LOWER)
"""For bytes.translate: lower case, and a space for each byte that is part of no word."""
SHORTEST_WORD = 3
_ANYTHING, _BETWEEN = "\0", "\1"
_WORD_ENDS = ([(op.CATEGORY, op.CATEGORY_SPACE)], [(op.CATEGORY, op.CATEGORY_NOT_WORD)])


class CatalogueError(ValueError):
    """A file of the catalogue is wrong."""


@dataclass(frozen=True)
class Pattern:
    """One regular expression."""

    text: str

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.text, re.IGNORECASE)

    @cached_property
    def words(self) -> frozenset[bytes]:
        """Return all whole words that every match contains, in lower case."""
        literal = _literal(_parser.parse(self.text))
        found = re.findall(rf"(?<![\w{_ANYTHING}])\w+(?![\w{_ANYTHING}])", literal, re.ASCII)
        return frozenset(word.lower().encode() for word in found)

    @cached_property
    def word(self) -> bytes:
        """Return the longest of them. Raise ValueError if there is none."""
        longest = max(sorted(self.words), key=len, default=b"")
        if len(longest) < SHORTEST_WORD:
            raise ValueError(
                f"pattern {self.text!r} must have a whole word of {SHORTEST_WORD} letters outside of groups and"
                " alternatives, so that large logs can be searched in time."
            )
        return longest


def _literal(parsed: Sequence[tuple[Any, Any]]) -> str:
    """Return the text of every match, with _ANYTHING for unknown parts, and _BETWEEN or a space for ends of words."""
    made = ""
    for kind, value in parsed:
        if kind is op.LITERAL:
            made += chr(value)
        elif kind is op.AT or (kind is op.IN and value in _WORD_ENDS):
            made += " "
        elif kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, _, repeated = value
            inner = _literal(repeated)
            made += inner if inner == _BETWEEN or (least and inner == " ") else _ANYTHING
        else:
            made += _BETWEEN if kind is op.ANY else _ANYTHING
    return made


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What one line of a log shows."""

    role: Role
    pattern: Pattern
    near: Pattern | None = None
    """What another line must show, in the same traceback or near, and of the same process if that is known."""
    anywhere: str = ""
    """Why it counts without the entry's context: no other program can print it."""


@dataclass(frozen=True, kw_only=True)
class Affected:
    """Releases of a package that have the failure; "unknown" if not examined."""

    package: str
    first: str
    last: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Repro:
    """The smallest way to reproduce it."""

    needs: ReproClass
    does: str
    no_case: str = ""  # why launch/repro.py has no case of it, in one sentence


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run that showed it."""

    versions: Mapping[str, str]
    date: str
    device: str
    result: str


@dataclass(frozen=True, kw_only=True)
class Example:
    """Lines of a log, and their origin."""

    source: str
    """measured: what ran; reported: URL of the page that has these lines; source: a program whose source has the message
    (a time stamp before it is made up); harness: our module that prints it; signature: put together around a quoted part."""
    log: str


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    """One known failure."""

    slug: str
    title: str
    phases: tuple[str, ...]  # of harness/runtime/phases.py, in which it shows
    cause: str
    fix: str
    signatures: tuple[Signature, ...]
    affected: tuple[Affected, ...]
    repro: Repro
    examples: tuple[Example, ...]
    context: tuple[str, ...]
    """Names of surroundings.toml, one of which the log must show: another program's same sentence is another failure."""
    conditions: tuple[Pattern, ...] | None = None
    """What a log must show besides a cause for high confidence; (): nothing; left out: no log can show all of it."""
    links: tuple[str, ...] = ()
    consequence: bool = False  # it follows from another failure: named only if nothing else is known
    seen: tuple[Measurement, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What logs have besides signatures."""

    contexts: Mapping[str, tuple[Pattern, ...]]
    harmless: tuple[Pattern, ...]  # lines that look like a failure but are none
    wrappers: tuple[Pattern, ...]  # exceptions that only report a failure of another process, or another exception
    other_engines: tuple[Pattern, ...]  # engines that are not SGLang: a trainer that runs one is no context
    other_engine_packages: tuple[str, ...]  # an exception with frames of these, and none of SGLang's, is theirs
    trainer_packages: tuple[str, ...]  # packages and folders of trainers that run SGLang


@cache
def catalogue(folder: Path = FOLDER) -> Mapping[str, CatalogueEntry]:
    """Return all entries by slug, in alphabetical order. Raise CatalogueError."""
    entries = [read_entry(file) for file in sorted(folder.glob("*.toml"))]
    known = {*surroundings().contexts, OF_SGLANG}
    for entry in entries:
        if unknown := set(entry.context) - known:
            raise CatalogueError(f"{entry.slug}: context must be in {SURROUNDINGS.name}, got {sorted(unknown)}")
    return {entry.slug: entry for entry in entries}


@cache
def surroundings(file: Path = SURROUNDINGS) -> Surroundings:
    made: Surroundings = _checked(Surroundings, tomllib.loads(file.read_text(encoding="utf-8")), file.name)
    return made


def read_entry(file: Path) -> CatalogueEntry:
    """Read one file. Raise CatalogueError, naming file and key."""
    try:
        entry: CatalogueEntry = _checked(CatalogueEntry, tomllib.loads(file.read_text(encoding="utf-8")), file.name)
    except tomllib.TOMLDecodeError as error:
        raise CatalogueError(f"{file.name}: {error}") from error
    if entry.slug != file.stem or not _SLUG.fullmatch(entry.slug):
        raise CatalogueError(f"{file.name}: slug must be the file's name, of a-z, 0-9 and -, got {entry.slug!r}")
    for name in ("phases", "affected", "examples", "context"):
        if not getattr(entry, name):
            raise CatalogueError(f"{file.name}: {name} is empty, but must have at least one")
    if not any(signature.role in ("cause", "likely") for signature in entry.signatures):
        raise CatalogueError(f"{file.name}: signatures must have a cause or a likely one, or it would never be named")
    if wrong := [link for link in entry.links if not link.startswith("https://")]:
        raise CatalogueError(f"{file.name}: links must be https:// addresses, got {wrong}")
    return entry


def _checked(kind: Any, value: Any, where: str) -> Any:
    """Return a value of a TOML file as that type. Raise CatalogueError."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return _checked(arguments[0], value, where)
    if kind is Pattern:
        try:
            pattern = Pattern(_checked(str, value, where))
            assert pattern.regex and pattern.word
            return pattern
        except (ValueError, re.error) as error:
            raise CatalogueError(f"{where}: {error}") from error
    if origin is Literal:
        if value not in arguments:
            raise CatalogueError(f"{where} must be one of {', '.join(arguments)}, got {value!r}")
        return value
    plain = {tuple: list, Mapping: dict}.get(origin, dict if hasattr(kind, "__dataclass_fields__") else kind)
    if not isinstance(value, plain):
        raise CatalogueError(f"{where} must be of type {plain.__name__}, got {value!r}")
    if origin is tuple:
        return tuple(_checked(arguments[0], each, f"{where}[{index}]") for index, each in enumerate(value))
    if origin is Mapping:
        return {key: _checked(arguments[1], each, f"{where}.{key}") for key, each in value.items()}
    if plain is dict:
        hints = get_type_hints(kind)
        if unknown := sorted(set(value) - set(hints)):
            raise CatalogueError(f"{where}: {', '.join(unknown)} is unknown; the keys are {', '.join(hints)}")
        if missing := sorted({field.name for field in fields(kind) if field.default is MISSING} - set(value)):
            raise CatalogueError(f"{where}: {', '.join(missing)} is missing")
        return kind(**{key: _checked(hints[key], each, f"{where}: {key}") for key, each in value.items()})
    if kind is str and not value.strip():
        raise CatalogueError(f"{where} is empty; leave it out, or write {UNKNOWN}")
    return value
