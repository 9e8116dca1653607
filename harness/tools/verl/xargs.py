"""The commands that xargs would start, from its own words and from what it would read."""

import getopt
import shlex
from collections.abc import Mapping, Sequence

LONGEST_INPUT = 1 << 20
MOST_COMMANDS = 100
_SHORT = "0oprtxd:I:n:P:"
_LONG = {
    "null": "-0",
    "no-run-if-empty": "-r",
    "verbose": "-t",
    "delimiter=": "-d",
    "max-args=": "-n",
    "max-procs=": "-P",
}
"""The options that are understood. Others take words from elsewhere, or count lines or letters."""


def commands_of_xargs(words: Sequence[str], read: str) -> list[list[str]] | None:
    """Return the commands, at most MOST_COMMANDS. words: those after xargs. read: what stands in its standard input.

    None if they cannot be known: xargs has another option, the input is too long, or has a quote that is not closed.
    """
    if len(read) > LONGEST_INPUT:
        return None
    try:
        found, command = getopt.getopt(list(words), _SHORT, list(_LONG))
        named = {f"--{name.rstrip('=')}": short for name, short in _LONG.items()}
        options = {named.get(name, name): value for name, value in found}
        items, size = _items(read, options), int(options.get("-n", "0"))
    except (getopt.GetoptError, ValueError):
        return None
    if place := options.get("-I"):
        return [[word.replace(place, item) for word in command] for item in items[:MOST_COMMANDS]]
    if not items:
        return [] if "-r" in options else [command]
    size = size if size > 0 else len(items)
    return [[*command, *items[at : at + size]] for at in range(0, min(len(items), size * MOST_COMMANDS), size)]


def _items(read: str, options: Mapping[str, str]) -> list[str]:
    """Return what xargs makes words of. Raise ValueError for a quote that is not closed."""
    end = "\0" if "-0" in options else options.get("-d", "").encode().decode("unicode_escape")
    if end:
        return read.removesuffix(end).split(end) if read else []
    lexer = shlex.shlex(read, posix=True)
    lexer.whitespace_split, lexer.commenters, lexer.escapedquotes = True, "", ""
    if "-I" in options:
        lexer.whitespace = "\n"
        return [item.lstrip(" \t") for item in lexer]
    return list(lexer)
