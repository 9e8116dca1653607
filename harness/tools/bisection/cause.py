"""Whether two failures have one cause, as far as their words and places say."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

from harness.tools.bisection.state import Attempt

_EXCEPTION = re.compile(
    r"(?:[\w.]*\.)?(\w+(?:Error|Exception|Interrupt|Warning|Exit|Failure|Refused|Failed|Died))\b(?:\s*[:(]|$)"
)
_VARIABLE = re.compile(
    r"(?:[A-Za-z]:)?(?:[\w.~-]*/)+[\w.~+-]*"  # a path
    r"|0x[0-9a-fA-F]+|\b[0-9a-fA-F]{8,}\b"
    r"|\btmp\w{6,}\b"
    r"|[\w.-]*\d[\w.-]*"  # a number, and whatever is spelled with one
)
_WORD = re.compile(r"[A-Za-z_][\w.]*|#")
_QUOTED = re.compile(r"(?<!\w)['\"`]([^'\"`]{1,80})['\"`](?!\w)")
_NAMED = frozenset({"ImportError", "ModuleNotFoundError", "AttributeError", "NameError"})
"""Classes whose message is a name that does not vary: fp4 for fp8 is another failure."""
_IMPORTS = frozenset({"ImportError", "ModuleNotFoundError"})
_EVERYWHERE = frozenset(
    {"<module>", "__init__", "__call__", "forward", "main", "run", "wrapper", "_wrapper", "<lambda>"}
)
_ALIKE, _SPECIFIC_WORDS, _LEAST_LETTERS = 0.75, 3, 3


@dataclass(frozen=True, slots=True)
class Cause:
    """What two failures are compared by."""

    kind: str
    """The exception's class, or how it ended where there is none: hang, a signal, an exit code."""
    shape: tuple[str, ...]
    """The message's words; what varies from run to run is #."""
    names: frozenset[str]
    """What the message has in quotes."""
    place: str
    """FILE:FUNCTION; "" where it is not known."""
    slug: str
    """Of the known failure that it is."""


def cause_of(attempt: Attempt) -> Cause:
    """Of a failed attempt."""
    if attempt.timed_out:
        return Cause("hang", (), frozenset(), "", "")
    if not attempt.failure:
        return Cause(f"exit code {attempt.code}", (), frozenset(), attempt.place, attempt.slug)
    match = _EXCEPTION.search(attempt.failure)
    kind = match[1] if match else f"exit code {attempt.code}"
    message = attempt.failure[match.end() :] if match else attempt.failure
    plain = re.sub(r"['\"`]", " ", _VARIABLE.sub("#", message))
    shape = tuple(word.rstrip(".") for word in _WORD.findall(plain))
    quoted = _QUOTED.findall(message)
    names = frozenset(quoted if kind in _NAMED else (_VARIABLE.sub("#", name) for name in quoted)) - {"#"}
    return Cause(kind, shape, names, attempt.place, attempt.slug)


def same(one: Cause, other: Cause) -> bool:
    """One cause: the same message, whatever numbers and paths are in it, from the same place; or a message that was rephrased
    in that place. Where a place is not known, the message decides."""
    return _same_message(one, other) and _same_place(one, other)


def differ_only_in_place(one: Cause, other: Cause) -> bool:
    """The message is the same, but it comes from another function."""
    return _same_message(one, other) and not _same_place(one, other)


def pattern_for(wanted: Attempt, other: Attempt) -> str:
    """What --match can take to find the one failure and not the other; "" where their words are the same."""
    if wanted.slug and wanted.slug != other.slug:
        return wanted.slug
    found = [text for text in _literal_parts(wanted.failure) if not re.search(re.escape(text), other.failure)]
    return max(found, key=len, default="").strip()


def _same_message(one: Cause, other: Cause) -> bool:
    if one.slug and one.slug == other.slug:
        return True
    specific = min(len(one.shape), len(other.shape)) >= _SPECIFIC_WORDS
    if one.kind == other.kind and one.names != other.names:
        return False
    if one.shape == other.shape and (one.kind == other.kind or specific):
        return True
    if not one.place or one.place != other.place or not one.shape or not other.shape:
        return False
    if one.kind != other.kind and not {one.kind, other.kind} <= _IMPORTS and _share_a_name(one, other):
        return True
    return specific and SequenceMatcher(None, one.shape, other.shape, autojunk=False).ratio() >= _ALIKE


def _share_a_name(one: Cause, other: Cause) -> bool:
    """Whether one message quotes what the other one has too: the same thing was missed, and another class says so."""
    return _has_a_name(one, other) or _has_a_name(other, one)


def _has_a_name(one: Cause, other: Cause) -> bool:
    for name in other.names:
        words = {word for word in _WORD.findall(name) if len(word) >= _LEAST_LETTERS}
        if words and words <= set(one.shape):
            return True
    return False


def _same_place(one: Cause, other: Cause) -> bool:
    if not one.place or not other.place or one.place == other.place:
        return True
    functions = {cause.place.rpartition(":")[2] for cause in (one, other)}
    specific = min(len(one.shape), len(other.shape)) >= _SPECIFIC_WORDS
    return len(functions) == 1 and specific and not functions & _EVERYWHERE  # a function that moved to another file


def _literal_parts(text: str) -> Iterator[str]:
    """Stretches of words without anything that varies, and without what means more to a shell or a regular expression."""
    for part in re.split(r"[#'\"`\\$!()\[\]{}*+?|^<>]", _VARIABLE.sub("#", text)):
        if len(part.strip(" .,:;()[]")) > 3:
            yield part.strip()
