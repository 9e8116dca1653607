"""The catalogue of known failures: one TOML file for each in catalogue/, and patterns for large logs.

A pattern is a regular expression that ignores case. Large logs are searched in time because only lines with certain
words are matched: each pattern must have whole words that every match contains. Its first and last words count as whole
words, and a dot stands between words.
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
"""cause: only this failure prints it; likely: mostly this one; hint: healthy runs print it too; excludes: only others
do."""
UNKNOWN = "unknown"
OF_SGLANG = "rl"
"""The context of a trainer whose only engine is SGLang."""

TABLE = (
    bytes(byte if chr(byte).isalnum() or byte == ord("_") else 32 for byte in bytes(range(128)).lower()) + b" " * 128
)
"""For bytes.translate: lower case, with spaces for all bytes that are not part of a word."""
SHORTEST_WORD = 3
_ANYTHING, _BETWEEN = "\0", "\1"
_WORD_ENDS = ([(op.CATEGORY, op.CATEGORY_SPACE)], [(op.CATEGORY, op.CATEGORY_NOT_WORD)])


class CatalogueError(ValueError):
    """A file of the catalogue is wrong."""


class Pattern(str):
    """One regular expression."""

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """Return it so that whole words at its ends match only as such, as in the search."""
        literal = _literal(_parser.parse(self))
        begin = r"\b" if re.match(rf"\w+(?![\w{_ANYTHING}])", literal) else ""
        end = r"\b" if re.search(rf"(?<![\w{_ANYTHING}])\w+$", literal) else ""
        return re.compile(f"{begin}(?:{self}){end}", re.IGNORECASE)

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
    near: Pattern | None = None  # must match another line of the process, in the same traceback or nearby
    anywhere: str = ""  # why it counts in any context: no other program can print it
    elsewhere: str = ""  # why the name is true of it in other programs too: there the failure looks like it


@dataclass(frozen=True, kw_only=True)
class Affected:
    """The releases of a package that have the failure."""

    package: str
    first: str = ""  # "" if not examined
    last: str = ""
    note: str = ""


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
    cause: str
    fix: str
    signatures: tuple[Signature, ...]
    affected: tuple[Affected, ...]
    examples: tuple[Mapping[str, str], ...]
    """log: lines; source: where they come from. measured: we ran it; reported: URL of a page that shows them; source: a
    program that prints the message (the time stamp is made up); harness: our module; signature: put together around a
    quotation."""
    context: tuple[str, ...]
    """Names of surroundings.toml; the log must show one of them, since other programs print the same sentences.
    (): cause and fix are the same in every program; a failure of any program looks like it."""
    conditions: tuple[Pattern, ...] = ()
    """What else a log must show for a line that this failure usually prints ("likely") to name it for sure."""
    links: tuple[str, ...] = ()
    consequence: bool = False  # it follows from another failure: named only if nothing else is known
    deliberate: bool = False  # somebody asked for it: named before all other failures
    no_case: str = ""
    """Why launch/repro.py has no case of it, and how to reproduce it by hand; "" if there is a case."""
    seen: tuple[Measurement, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NextStep:
    """The next thing to look at when a line matches no entry."""

    pattern: Pattern
    text: str
    near: Pattern | None = None  # must match a call of its traceback, written "FILE in FUNCTION"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What logs show apart from signatures."""

    contexts: Mapping[str, tuple[Pattern, ...]]
    harmless: tuple[Pattern, ...]  # lines that look like a failure but are none
    wrappers: tuple[Pattern, ...]  # exceptions that only report a failure of another process, or another exception
    consequences: tuple[Pattern, ...]  # exceptions that another failure usually causes, of another process or a server
    next_steps: tuple["NextStep", ...]  # what to look at if a failure is unknown; the first that fits counts
    other_engines: tuple[Pattern, ...]  # engines that are not SGLang: a trainer that runs one is no context
    other_engine_packages: tuple[str, ...]  # an exception with frames of these, and none of SGLang's, is theirs
    programs: tuple[Pattern, ...]  # names of a run's processes, as the kernel prints them: of at most 15 letters
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
