"""The catalogue of known failures: one TOML file for each in catalogue/, and patterns for large logs.

A pattern is a regular expression, matched without regard to case. Each must have whole words that every match contains, so
that only lines with all of them are searched: its first and last words count as whole ones, and a dot stands between words.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache, cached_property
from pathlib import Path
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from types import UnionType
from typing import Any, Literal, get_args, get_type_hints

FOLDER = Path(__file__).with_name("catalogue")
SURROUNDINGS = Path(__file__).with_name("surroundings.toml")

Role = Literal["cause", "likely", "hint", "excludes"]
"""cause: seen in this failure alone; likely: usually; hint: in others and in healthy runs too; excludes: in others alone."""
ReproClass = Literal["cpu", "one_gpu", "several_gpus", "hosts"]
UNKNOWN = "unknown"
OF_SGLANG = "rl"
"""The context of a trainer that runs no other engine than SGLang."""

TABLE = (
    bytes(byte if chr(byte).isalnum() or byte == ord("_") else 32 for byte in bytes(range(128)).lower()) + b" " * 128
)
"""For bytes.translate: lower case, and a space for each byte that is part of no word."""
SHORTEST_WORD = 3
_ANYTHING, _BETWEEN = "\0", "\1"
_WORD_ENDS = ([(op.CATEGORY, op.CATEGORY_SPACE)], [(op.CATEGORY, op.CATEGORY_NOT_WORD)])


class CatalogueError(ValueError):
    """A file of the catalogue is wrong."""


class Pattern(str):
    """One regular expression."""

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self, re.IGNORECASE)

    @cached_property
    def words(self) -> frozenset[bytes]:
        """Return all whole words that every match contains, in lower case."""
        literal = _literal(_parser.parse(self))
        found = re.findall(rf"(?<![\w{_ANYTHING}])\w+(?![\w{_ANYTHING}])", literal, re.ASCII)
        return frozenset(word.lower().encode() for word in found)

    @cached_property
    def word(self) -> bytes:
        """Return the longest of them. Raise CatalogueError if none is long enough to search large logs in time."""
        longest = max(sorted(self.words), key=len, default=b"")
        if len(longest) < SHORTEST_WORD:
            raise CatalogueError(
                f"pattern {str(self)!r} must have a word of {SHORTEST_WORD} letters outside of groups and alternatives"
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
    near: Pattern | None = None  # what another line of the process must show, in the same traceback or near
    anywhere: str = ""  # why it counts without the entry's context: no other program can print it


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
    examples: tuple[Mapping[str, str], ...]
    """log: lines; source: their origin. measured: what ran; reported: URL of the page that has them; source: a program whose
    source has the message (a time stamp is made up); harness: our module; signature: put together around a quoted part."""
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
def catalogue() -> Mapping[str, CatalogueEntry]:
    """Return all entries by slug, in alphabetical order. Raise CatalogueError."""
    return {file.stem: read_entry(file) for file in sorted(FOLDER.glob("*.toml"))}


@cache
def surroundings() -> Surroundings:
    made: Surroundings = _made(Surroundings, tomllib.loads(SURROUNDINGS.read_text(encoding="utf-8")))
    return made


def read_entry(file: Path) -> CatalogueEntry:
    """Read one file, whose values tests/tools/diagnose checks. Raise CatalogueError, naming file and key."""
    try:
        entry: CatalogueEntry = _made(CatalogueEntry, tomllib.loads(file.read_text(encoding="utf-8")))
        return entry
    except (tomllib.TOMLDecodeError, TypeError, KeyError) as error:
        raise CatalogueError(f"{file.name}: {error}") from error


def _made(kind: Any, value: Any) -> Any:
    """Return a value of a TOML file as this type. Raise KeyError for an unknown key, TypeError for a missing one."""
    kind = get_args(kind)[0] if isinstance(kind, UnionType) else kind
    if isinstance(value, list):
        return tuple(_made(get_args(kind)[0], each) for each in value)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{key: _made(hints[key], each) for key, each in value.items()})  # type: ignore[operator]
    if isinstance(value, dict):
        return {key: _made(get_args(kind)[1], each) for key, each in value.items()}
    return Pattern(value) if kind is Pattern else value
