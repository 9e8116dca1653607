"""Command lines from dataclasses, with the standard library: --help must work on a Python that has nothing else.

A field is an option, its docstring the help; str, int, float, bool, Literal, tuples of them and `| None`.
"""

import argparse
import ast
import difflib
import inspect
import shutil
import textwrap
import types
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from harness.config.layers import ConfigError

T = TypeVar("T")
WIDEST = 120


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse prints its usage and ends the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument ") + ".")


def read_options(kind: type[T], prog: str, description: str, words: Sequence[str]) -> T:
    """The options that a command line gives; the others have their defaults. --help prints them and ends the process.

    Raises ConfigError, one sentence, for an option that there is not (it names the nearest), or a wrong value.
    """
    found, rest = read_known_options(kind, prog, description, words)
    if rest:
        word = rest[0].partition("=")[0]
        nearest = difflib.get_close_matches(word, [_option(each) for each in fields(kind)], n=1)  # type: ignore[arg-type]
        hint = f"the nearest is {nearest[0]}" if nearest else f"{prog} --help lists what there is"
        raise ConfigError(f"{word} (command line) is not an option; {hint}.")
    return found


def read_known_options(kind: type[T], prog: str, description: str, words: Sequence[str]) -> tuple[T, list[str]]:
    """The same, and the words that are none of these options."""
    if {"-h", "--help"} & set(words):
        print(help_text(prog, description, {"options": kind}))
        raise SystemExit(0)
    parser = Parser(prog=prog, add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for field in fields(kind):  # type: ignore[arg-type]
        parser.add_argument(_option(field), dest=field.name, **_how(field.type))
    given, rest = parser.parse_known_args([_with_hyphens(word) for word in words])
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(given).items()}
    return kind(**values), rest


def help_text(prog: str, description: str, sections: dict[str, type]) -> str:
    """Every field of each section with type, default and meaning; the options of a config section are SECTION.FIELD."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    lines = [f"usage: {prog} [OPTION ...]", "", description.strip(), ""]
    for title, kind in sections.items():
        lines += [f"{title}: {inspect.getdoc(kind) or ''}", ""]
        docs = _docs(kind)
        for field in fields(kind):
            name = _option(field) if title == "options" else f"--{title}.{field.name}"
            lines.append(f"  {name}{_shown(field)}")
            lines += textwrap.wrap(docs.get(field.name, ""), width, initial_indent=" " * 6, subsequent_indent=" " * 6)
        lines.append("")
    return "\n".join(lines).rstrip()


def _option(field: "Field[Any]") -> str:
    return "--" + field.name.replace("_", "-")


def _with_hyphens(word: str) -> str:
    """--nproc_per_node as --nproc-per-node; keys such as --actor.learning_rate are left alone."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") and "." not in name else word


def _how(kind: Any) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is tuple:
        return _how(get_args(kind)[0]) | {"nargs": "+", "action": "extend"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if isinstance(kind, types.UnionType):
        return _how(next(each for each in get_args(kind) if each is not types.NoneType))
    return {"type": kind}


def _shown(field: "Field[Any]") -> str:
    """What follows the name: the value's kind, and the default."""
    kind = field.type
    inner = get_args(kind)[0] if get_origin(kind) is tuple else kind
    if isinstance(inner, types.UnionType):
        inner = get_args(inner)[0]
    name = "|".join(map(str, get_args(inner))) if get_origin(inner) is Literal else getattr(inner, "__name__", "value")
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    value = "" if default in ("", (), {}, [], None, False) else f"  (default: {default!r})"
    return ("" if kind is bool else f" {name.upper() if '|' not in name else name}") + value


def _docs(kind: type) -> dict[str, str]:
    """The string below each field of a dataclass and of those that it inherits from."""
    return dict(pair for each in reversed(kind.__mro__) if each is not object for pair in _docs_of(each))


def _docs_of(kind: type) -> Iterator[tuple[str, str]]:
    [node] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    for field, below in zip(node.body, node.body[1:], strict=False):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            yield field.target.id, " ".join(str(below.value.value).split())  # type: ignore[attr-defined]
