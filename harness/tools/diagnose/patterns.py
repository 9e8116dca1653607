"""Regular expressions that are looked for in large logs: each has whole words without which it cannot match, and only
lines with all of them are searched.

Patterns are read without regard to case. A pattern's first and last words count as whole ones, and a dot stands between
words, never inside of one.
"""

import re
from dataclasses import dataclass
from functools import cached_property

_WORD_BYTES = b"abcdefghijklmnopqrstuvwxyz0123456789_"
TABLE = bytes(
    (lower if (lower := ord(chr(byte).lower())) in _WORD_BYTES else 32) if byte < 128 else 32 for byte in range(256)
)
"""For bytes.translate: lower case, and a space for whatever is part of no word."""
SHORTEST_WORD = 3
_UNKNOWN, _BETWEEN = "\0", "\1"


@dataclass(frozen=True)
class Pattern:
    """One regular expression."""

    text: str

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """Compiled. Raises re.error."""
        return re.compile(self.text, re.IGNORECASE)

    @cached_property
    def words(self) -> frozenset[bytes]:
        """All whole words that every match contains, in lower case."""
        found = re.findall(rf"(?<![\w{_UNKNOWN}])\w+(?![\w{_UNKNOWN}])", _literal(self.text), re.ASCII)
        return frozenset(word.lower().encode() for word in found)

    @cached_property
    def word(self) -> bytes:
        """The longest of them. Raises ValueError where there is none."""
        longest = max(sorted(self.words), key=len, default=b"")
        if len(longest) < SHORTEST_WORD:
            raise ValueError(
                f"pattern {self.text!r} has no whole word of {SHORTEST_WORD} letters outside of its groups; without one a"
                " large log cannot be searched in time."
            )
        return longest


def _literal(pattern: str) -> str:
    """What a match certainly has, in order; _UNKNOWN for what may be anything, _BETWEEN or a space for what ends a word."""
    made: list[str] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            escaped = pattern[at + 1 : at + 2]
            made.append(" " if escaped in "bsW" else _UNKNOWN if escaped.isalnum() else escaped)
            at += 2
        elif char in "([":
            at = _closing(pattern, at) + 1
            made.append(_UNKNOWN)
        elif char == "{":
            made[-1] = made[-1] if made[-1] in (" ", _BETWEEN) and pattern[at + 1] != "0" else _UNKNOWN
            at = pattern.index("}", at) + 1
        elif char == "|":
            raise ValueError(f"pattern {pattern!r} has | outside of a group; write two signatures.")
        elif char in "?*":
            made[-1] = made[-1] if made[-1] == _BETWEEN else _UNKNOWN
            at += 1
        else:
            made.append({"^": " ", "$": " ", ".": _BETWEEN, "+": ""}.get(char, char))
            at += 1
    return "".join(made)


def _closing(pattern: str, opening: int) -> int:
    """Where the group or class that begins there ends."""
    depth, at = 0, opening
    in_class = False
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        if depth == 0 and not in_class:
            return at
        at += 1
    raise ValueError(f"pattern {pattern!r} has a group that does not end.")
