"""Python literals, in lines of 120 characters."""

from collections.abc import Mapping
from typing import Any

WIDTH = 120
INDENT = 4


def literal(value: Any, taken: int, indent: int = 0) -> str:
    """value: of what TOML has. taken: characters of its first line beside it; indent: of that line."""
    whole = _flat(value)
    if not isinstance(value, Mapping | list | tuple) or not value or indent + taken + len(whole) <= WIDTH:
        return whole
    if isinstance(value, Mapping):
        items = [f"{_flat(name)}: {_flat(each)}" for name, each in value.items()]
    else:
        items = [_flat(each) for each in value]
    rows = [""]
    for item in items:  # as many as fit, so that a model's shape is a paragraph and not a page
        if rows[-1] and indent + INDENT + len(rows[-1]) + len(item) + 2 > WIDTH:
            rows.append("")
        rows[-1] += f"{' ' if rows[-1] else ''}{item},"
    lines = "".join(f"{' ' * (indent + INDENT)}{row}\n" for row in rows)
    opening, closing = "{}" if isinstance(value, Mapping) else "[]"
    return f"{opening}\n{lines}{' ' * indent}{closing}"


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_flat(name)}: {_flat(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flat, value)) + "]"
    if isinstance(value, str):
        return quoted(value)
    return repr(value)


def quoted(text: str) -> str:
    """A string literal: ASCII, in double quotes unless others need fewer backslashes."""
    plain = ascii(text)
    if plain[0] == '"' or '"' in plain:
        return plain
    return '"' + plain[1:-1].replace("\\'", "'") + '"'
