"""Command lines, with the standard library alone: --help must work on a Python that has nothing else.

`read_options` makes a parser of any dataclass: a field is an option, the text below it the help; str, int, float, bool,
Literal, `| None`, tuples (all values after one option) and lists (one value each time). `parse` is the command line of a
run: options, TOML files, and --section.key VALUE.
"""

import argparse
import ast
import inspect
import json
import math
import os
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin

from harness.config.layers import COMMAND_LINE, KINDS, ConfigError, build_config, nearest, override_layer, read_layer
from harness.config.rules import check
from harness.config.schema import Config
from harness.tools.fault_spec import check_fault

T = TypeVar("T")
WIDEST = 120
READER_GONE = 141
"""What a shell says of a program that SIGPIPE ended, such as `yes` in `yes | head`."""


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
    save_rollouts: str = ""
    """Folder for each step's responses: rollout.save."""
    load_rollouts: str = ""
    """Folder of saved responses, on which the learner runs alone: rollout.load."""
    rollouts_only: bool = False
    """Run the engine alone, with nothing to learn: rollout.only."""


class Command(NamedTuple):
    """A parsed command line, its config checked."""

    config: Config
    options: RunOptions


def parse(arguments: Sequence[str], script_options: type | None = None) -> Command:
    """Read `[FILE.toml ...] [--section.key VALUE ...] [--dry-run ...]`. Raise ConfigError for anything else.

    script_options: those that the script has read before, in place of RunOptions in a hint at the nearest one.
    """
    options, rest = _parse_known(RunOptions, arguments)
    files: list[str] = []
    overrides: list[tuple[str, str]] = []
    while rest:
        word = rest.pop(0)
        key, has_value, value = word.removeprefix("--").partition("=")
        if word.endswith(".toml") and not word.startswith("--"):
            files.append(word)
            continue
        if not word.startswith("--"):
            what = f'"{word}" ({COMMAND_LINE}) must be a TOML file or an option'
            raise ConfigError(f"{what}; write --section.key VALUE, or FILE.toml.")
        if "." not in key:
            raise _unknown_option(script_options or RunOptions, word, "config keys are written --section.key VALUE")
        if not has_value:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{key} ({COMMAND_LINE}) has no value; write --{key} VALUE.")
            value = rest.pop(0)
        overrides.append((key.replace("-", "_"), value))
    if options.inject:
        overrides = [pair for pair in overrides if pair[0] != "run.inject"]
        overrides.append(("run.inject", json.dumps(options.inject)))
    halves = {"save": options.save_rollouts, "load": options.load_rollouts, "only": "true" * options.rollouts_only}
    overrides += [(f"rollout.{name}", text) for name, text in halves.items() if text]
    config = build_config([*map(read_layer, files), override_layer(overrides)])
    check(config)
    for text in config.run.inject:
        try:
            check_fault(text, config)
        except ValueError as error:
            raise ConfigError(f'run.inject = "{text}" cannot work: {error}.') from error
    _check_options(options, config)
    return Command(config, options)


def print_help(prog: str, description: str) -> None:
    """Print all options and keys of a run with type, default and meaning."""
    sections = {each.name: type(getattr(Config(), each.name)) for each in fields(Config)}
    usage = "[FILE.toml ...] [--section.key VALUE ...] [OPTION ...]"
    print(_help_text(prog, description, {"options": RunOptions, **sections}, usage))


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
        print(_help_text(prog, description, {"options": kind}))
        raise SystemExit(0)
    return _parse_known(kind, words)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError, one sentence."""
        raise ConfigError(message.removeprefix("argument ").replace(": must be", " must be") + ".")


def _help_text(prog: str, description: str, sections: dict[str, type], usage: str = "[OPTION ...]") -> str:
    """List every field of each section with type, default and meaning; a section's options are SECTION.FIELD."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    lines = [f"usage: {prog} {usage}", "", description.strip(), ""]
    for title, kind in sections.items():
        lines += [f"{title}: {inspect.getdoc(kind) or ''}", ""]
        docs = dict(pair for each in reversed(kind.__mro__[:-1]) for pair in _docs_of(each))
        for each in fields(kind):
            name = _option(each.name) if title == "options" else f"--{title}.{each.name}"
            default = each.default_factory() if each.default_factory is not MISSING else each.default
            value = "" if default in ("", (), {}, [], None, False) else f"  (default: {default!r})"
            lines.append(f"  {name}{_value_name(each.type)}{value}")
            lines += textwrap.wrap(docs.get(each.name, ""), width, initial_indent=" " * 6, subsequent_indent=" " * 6)
        lines.append("")
    return "\n".join(lines).rstrip()


def _parse_known(kind: type[T], words: Sequence[str]) -> tuple[T, list[str]]:
    parser = Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for each in fields(kind):  # type: ignore[arg-type]
        parser.add_argument(_option(each.name), dest=each.name, **_argument(each.type))
    given, rest = parser.parse_known_args(list(words))
    tuples = {each.name for each in fields(kind) if get_origin(each.type) is tuple}  # type: ignore[arg-type]
    return kind(**{name: tuple(value) if name in tuples else value for name, value in vars(given).items()}), rest


def _unknown_option(kind: type, word: str, otherwise: str) -> ConfigError:
    name, options = word.partition("=")[0], [_option(each.name) for each in fields(kind)]
    return ConfigError(f"{name} ({COMMAND_LINE}) is not an option; {nearest(name, options, otherwise)}.")


def _check_options(options: RunOptions, config: Config) -> None:
    """Check combinations of options, and set nproc_per_node where it is to be derived."""
    hosts, memory, lists = options.nnodes, options.gpu_memory_gib, len(options.cuda_visible_devices)
    ranks = config.parallel.dp * config.parallel.tp * config.parallel.pp
    unused = f"({COMMAND_LINE}) is for --dry-run; add it"
    even = f"must divide the mesh of {ranks} ranks, got {hosts}; or give --nproc-per-node"
    each = f"must be given once, or once for each of --nnodes {hosts}, got {lists}"
    for kept, option, text in (
        (options.dry_run or not options.json, "json", unused),
        (options.dry_run or not memory, "gpu-memory-gib", unused),
        (hosts >= 1, "nnodes", f"must be at least 1, got {hosts}"),
        (options.nproc_per_node >= 0, "nproc-per-node", f"must be at least 0, got {options.nproc_per_node}"),
        (0 <= memory < math.inf, "gpu-memory-gib", f"must be above 0, such as 80, got {memory}"),
        (lists in (0, 1, hosts), "cuda-visible-devices", each),
        (options.nproc_per_node or ranks % max(hosts, 1) == 0, "nnodes", even),
    ):
        if not kept:
            raise ConfigError(f"--{option} {text}.")
    options.nproc_per_node = options.nproc_per_node or ranks // hosts


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


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
        return _argument(get_args(kind)[0])

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {KINDS[kind]}, got '{text}'") from None

    return {"type": read}


def _value_name(kind: Any) -> str:
    """Return what follows an option's name: the kind of its value."""
    if get_origin(kind) in (tuple, list) or isinstance(kind, types.UnionType):
        return _value_name(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return " " + "|".join(map(str, get_args(kind)))
    if get_origin(kind) is dict:
        return ".NAME VALUE"
    return "" if kind is bool else f" {kind.__name__.upper()}"


def _docs_of(kind: type) -> Iterator[tuple[str, str]]:
    """Yield the name of each field that a dataclass defines itself, and the string below it."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    for statement, below in zip(node.body, node.body[1:], strict=False):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and is_text:
            yield statement.target.id, " ".join(str(below.value.value).split())  # type: ignore[attr-defined]


def exit_with(main: Callable[..., int], *arguments: object) -> NoReturn:
    """Call it, and end this process with what it returns; without a traceback into a closed pipe, as in `... | head`."""
    try:
        try:
            code: int | str | None = main(*arguments)
        except SystemExit as end:  # of argparse's --help
            code = end.code
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more as it ends
        code = READER_GONE
    sys.exit(code)
