"""Command lines, with the standard library alone: --help must work on a Python that has nothing else.

`read_options` makes a parser of any dataclass: a field is an option, the text below it the help; str, int, float, bool,
Literal, `| None`, tuples (all values after one option) and lists (one value each time). `parse` is the command line of a
run: options, TOML files, and --section.key VALUE.
"""

import argparse
import ast
import difflib
import inspect
import json
import shutil
import textwrap
import types
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from harness.config.layers import (
    COMMAND_LINE,
    KINDS,
    ConfigError,
    build_config,
    free_tables,
    override_layer,
    read_layer,
)
from harness.config.rules import check
from harness.config.schema import Config

T = TypeVar("T")
WIDEST = 120


@dataclass(kw_only=True)
class RunOptions:
    """What a command line says beside the config."""

    dry_run: bool = False
    """Print where every rank and engine would be, and start nothing."""
    json: bool = False
    """With --dry-run: as JSON."""
    check: bool = False
    """Check the config and stop."""
    nnodes: int = 1
    """With --dry-run or --check: hosts."""
    nproc_per_node: int = 0
    """With --dry-run or --check: ranks of a host; 0 means the mesh spread evenly over the hosts."""
    gpu_memory_gib: float = 0.0
    """With --dry-run: memory of a GPU, for the estimate of what fits; 0 means 80, that of an A100 or H100. An H200 has 140."""
    cuda_visible_devices: list[str] = field(default_factory=list)
    """With --dry-run: CUDA_VISIBLE_DEVICES of each host, in order; one for all hosts, or none for unset."""
    inject: list[str] = field(default_factory=list)
    """A fault to inject, KIND@PHASE[:rank][:step]; may be given more than once. Replaces run.inject."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A parsed command line, its config checked."""

    config: Config
    options: RunOptions


def parse(arguments: Sequence[str]) -> Command:
    """Read `[FILE.toml ...] [--section.key VALUE ...] [--dry-run ...]`. Raise ConfigError for anything else."""
    options, rest = _parse_known(RunOptions, arguments)
    files: list[str] = []
    overrides: list[tuple[str, str]] = []
    while rest:
        word = rest.pop(0)
        key, has_value, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            if not word.endswith(".toml"):
                raise ConfigError(
                    f'"{word}" ({COMMAND_LINE}) must be a TOML file or an option; write --section.key VALUE, or FILE.toml.'
                )
            files.append(word)
            continue
        if "." not in key:
            raise _unknown_option(RunOptions, word, "config keys are written --section.key VALUE")
        if not has_value:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{key} ({COMMAND_LINE}) has no value; write --{key} VALUE.")
            value = rest.pop(0)
        overrides.append((key.replace("-", "_"), value))
    if options.inject:
        overrides = [pair for pair in overrides if pair[0] != "run.inject"]
        overrides.append(("run.inject", json.dumps(options.inject)))
    config = build_config([*(read_layer(file) for file in files), override_layer(overrides)])
    check(config)
    _check_options(options, config)
    return Command(config=config, options=options)


def print_help(prog: str, description: str) -> None:
    """Print all options and keys with type, default and meaning."""
    tables = ", ".join(f"--{key}.NAME VALUE" for key in free_tables())
    sections = {each.name: type(getattr(Config(), each.name)) for each in fields(Config)}
    text = help_text(prog, f"{description}\nFree tables: {tables}.", {"options": RunOptions, **sections})
    print(text.replace("[OPTION ...]", "[FILE.toml ...] [--section.key VALUE ...] [OPTION ...]", 1))


def read_options(kind: type[T], prog: str, description: str, words: Sequence[str]) -> T:
    """Return the options that a command line gives; the others have their defaults. --help prints them and exits.

    Raise ConfigError, one sentence, for an unknown option (it names the nearest), or a wrong value.
    """
    found, rest = read_known_options(kind, prog, description, words)
    if rest:
        raise _unknown_option(kind, rest[0], f"{prog} --help lists what there is")
    return found


def read_known_options(kind: type[T], prog: str, description: str, words: Sequence[str]) -> tuple[T, list[str]]:
    """Read as read_options does, and return the words that are none of these options too."""
    if {"-h", "--help"} & set(words):
        print(help_text(prog, description, {"options": kind}))
        raise SystemExit(0)
    return _parse_known(kind, words)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError, one sentence."""
        raise ConfigError(message.removeprefix("argument ").replace(": must be", " must be") + ".")


def help_text(prog: str, description: str, sections: dict[str, type]) -> str:
    """List every field of each section with type, default and meaning; a section's options are SECTION.FIELD."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    lines = [f"usage: {prog} [OPTION ...]", "", description.strip(), ""]
    for title, kind in sections.items():
        lines += [f"{title}: {inspect.getdoc(kind) or ''}", ""]
        docs = _docs(kind)
        for each in fields(kind):
            name = _option(each) if title == "options" else f"--{title}.{each.name}"
            lines.append(f"  {name}{_shown(each)}")
            lines += textwrap.wrap(docs.get(each.name, ""), width, initial_indent=" " * 6, subsequent_indent=" " * 6)
        lines.append("")
    return "\n".join(lines).rstrip()


def _parse_known(kind: type[T], words: Sequence[str]) -> tuple[T, list[str]]:
    parser = Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for each in fields(kind):  # type: ignore[arg-type]
        parser.add_argument(_option(each), dest=each.name, **_argument(each.type))
    given, rest = parser.parse_known_args([_with_hyphens(word) for word in words])
    tuples = {each.name for each in fields(kind) if get_origin(each.type) is tuple}  # type: ignore[arg-type]
    return kind(**{name: tuple(value) if name in tuples else value for name, value in vars(given).items()}), rest


def _unknown_option(kind: type, word: str, otherwise: str) -> ConfigError:
    name = word.partition("=")[0]
    close = difflib.get_close_matches(name.lstrip("-"), [_option(each)[2:] for each in fields(kind)], n=1)
    hint = f"the nearest is --{close[0]}" if close else otherwise
    return ConfigError(f"{name} ({COMMAND_LINE}) is not an option; {hint}.")


def _check_options(options: RunOptions, config: Config) -> None:
    """Check combinations of options, and set nproc_per_node where it is to be derived."""
    for name in ("json", "gpu_memory_gib"):
        if getattr(options, name) and not options.dry_run:
            raise ConfigError(f"--{name.replace('_', '-')} ({COMMAND_LINE}) is for --dry-run; add it.")
    for name, least in (("nnodes", 1), ("nproc_per_node", 0)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}.")
    if not 0 <= options.gpu_memory_gib < float("inf"):
        raise ConfigError(f"--gpu-memory-gib must be above 0, such as 80, got {options.gpu_memory_gib}.")
    lists = len(options.cuda_visible_devices)
    if lists > 1 and lists != options.nnodes:
        raise ConfigError(
            f"--cuda-visible-devices must be given once, or once for each of --nnodes {options.nnodes}, got {lists}."
        )
    ranks = config.parallel.dp * config.parallel.tp * config.parallel.pp
    if options.nproc_per_node == 0:
        if ranks % options.nnodes:
            raise ConfigError(
                f"--nnodes must divide the mesh of {ranks} ranks, got {options.nnodes}; or give --nproc-per-node."
            )
        options.nproc_per_node = ranks // options.nnodes


def _option(field: "Field[Any]") -> str:
    return "--" + field.name.replace("_", "-")


def _with_hyphens(word: str) -> str:
    """Return --nproc_per_node as --nproc-per-node; keys such as --actor.learning_rate are left alone."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") and "." not in name else word


def _argument(kind: Any) -> dict[str, Any]:
    """Return how argparse reads a value of this type."""
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is tuple:
        return _argument(get_args(kind)[0]) | {"nargs": "+", "action": "extend"}
    if get_origin(kind) is list:
        return _argument(get_args(kind)[0]) | {"action": "append"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if isinstance(kind, types.UnionType):
        return _argument(next(each for each in get_args(kind) if each is not types.NoneType))

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {KINDS[kind]}, got '{text}'") from None

    return {"type": read}


def _shown(field: "Field[Any]") -> str:
    """Return what follows the name: the value's kind, and the default."""
    kind = field.type
    inner = get_args(kind)[0] if get_origin(kind) in (tuple, list) else kind
    if isinstance(inner, types.UnionType):
        inner = get_args(inner)[0]
    name = "|".join(map(str, get_args(inner))) if get_origin(inner) is Literal else getattr(inner, "__name__", "value")
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    value = "" if default in ("", (), {}, [], None, False) else f"  (default: {default!r})"
    return ("" if kind is bool else f" {name.upper() if '|' not in name else name}") + value


def _docs(kind: type) -> dict[str, str]:
    """Return the string below each field of a dataclass and of those that it inherits from."""
    return dict(pair for each in reversed(kind.__mro__) if each is not object for pair in _docs_of(each))


def _docs_of(kind: type) -> Iterator[tuple[str, str]]:
    [node] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    for statement, below in zip(node.body, node.body[1:], strict=False):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and is_text:
            yield statement.target.id, " ".join(str(below.value.value).split())  # type: ignore[attr-defined]
