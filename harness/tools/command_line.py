"""Read command lines with only the standard library, because --help must work on a Python that has nothing else.

`parse` reads the command line of a run: TOML files, --section.key VALUE, and the options in RunOptions. `read_options`
reads the options of any other script: they are the fields of a dataclass, and the text below a field is its help.
"""

import argparse
import ast
import inspect
import json
import os
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin

from harness.config.layers import (
    COMMAND_LINE,
    KINDS,
    OF_VERL,
    VERL_SECTIONS,
    ConfigError,
    Layer,
    build_config,
    key_types,
    nearest,
    override_layer,
    read_layer,
    refuse_redacted,
    toml_value,
)
from harness.config.resolve import SECTIONS, resolve
from harness.config.schema import Config
from harness.tools.fault_spec import check_fault

T = TypeVar("T")
WIDEST = 120
COMMON = (
    "model.name", "engine.device", "parallel.dp", "parallel.tp", "run.steps", "run.seed", "run.dir", "task.source",
    "task.reward", "rollout.prompts_per_step", "rollout.responses_per_prompt", "rollout.max_response_tokens",
    "algorithm.advantage", "actor.learning_rate", "actor.minibatch_size", "weights.transport", "weights.verify",
    "engine.args", "checkpoint.every",
)  # fmt: skip
"""The keys that --help shows first, with the first sentence of their text."""
READER_GONE = 141
"""The exit code that a shell gives a program that SIGPIPE ended, such as `yes` in `yes | head`."""


@dataclass(kw_only=True)
class RunOptions:
    """Options that are not part of the config."""

    check: bool = False
    """Only check whether the config can work, and say what could not be checked."""
    dry_run: bool = False
    """Only print where every rank and engine would be, and the command that tells whether they fit in the GPUs."""
    nnodes: int = 1
    """With --dry-run or --check: the number of hosts."""
    nproc_per_node: int = 0
    """With --dry-run or --check: ranks on each host; 0 spreads the mesh evenly over the hosts."""
    cuda_visible_devices: list[str] = field(default_factory=list)
    """With --dry-run: CUDA_VISIBLE_DEVICES, once for all hosts, or once for each host in order. Default: unset."""
    inject: list[str] = field(default_factory=list)
    """Inject a fault, KIND@PHASE[:RANK][:STEP]; may be repeated. Replaces run.inject, which describes the kinds."""


class Command(NamedTuple):
    """A parsed command line. Its config has passed the rules that need no facts."""

    config: Config
    options: RunOptions
    files: tuple[str, ...]
    """The TOML files."""
    overrides: tuple[tuple[str, str], ...]
    """The keys that --section.key VALUE sets, over the files."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError, one sentence."""
        raise ConfigError(message.removeprefix("argument ").replace(": must be", " must be") + ".")


def parse(
    arguments: Sequence[str],
    script_options: type | None = None,
    sections: Collection[str] = SECTIONS,
    base: Sequence[Layer] = (),
) -> Command:
    """Read `[FILE.toml ...] [--section.key VALUE ...] [--dry-run ...]`. Raise ConfigError for anything else.

    script_options: the options that the script itself has read, for the hint at the nearest one.
    sections: those of the config that the script uses.
    base: layers that were read already; files and options come over them.
    """
    options, rest = _parse_known(RunOptions, arguments)
    files, overrides = _split(rest, script_options or RunOptions)
    if options.inject:
        overrides = [pair for pair in overrides if pair[0] != "run.inject"]
        overrides.append(("run.inject", json.dumps(options.inject)))
    config = build_config([*base, *map(read_layer, files), override_layer(overrides)])
    if not base:
        refuse_redacted(config)
    resolve(config, sections=sections)  # for what it refuses; a run fills in "auto" once it knows its facts
    for text in config.run.inject:
        try:
            check_fault(text, config)
        except ValueError as error:
            raise ConfigError(f'run.inject = "{text}" cannot work: {error}.') from error
    _check_options(options, config)
    return Command(config, options, tuple(files), tuple(overrides))


def refuse_plan_options(options: RunOptions) -> None:
    """Raise ConfigError for options by which only launch/ppo.py plans a run."""
    if options.dry_run or options.check or options.cuda_visible_devices or options.nnodes != 1:
        raise ConfigError("--dry-run, --check and what belongs to them are options of launch/ppo.py; leave them out.")


def read_options(kind: type[T], prog: str, description: str, words: Sequence[str]) -> T:
    """Return the options that a command line gives; the others have their defaults. --help prints them and exits.

    Raise ConfigError, one sentence, for an unknown option (it names the nearest), or a wrong value.
    """
    found, rest = read_known_options(kind, prog, description, words)
    if rest:
        raise unknown_option(kind, rest[0], f"{prog} --help lists what there is")
    return found


def read_known_options(kind: type[T], prog: str, description: str, words: Sequence[str]) -> tuple[T, list[str]]:
    """Read options as read_options does, and return the words that are not among them too."""
    if {"-h", "--help"} & set(words):
        print(f"usage: {prog} [OPTION ...]\n\n{description.strip()}\n\noptions:\n{_options_help(kind())}")
        raise SystemExit(0)
    return _parse_known(kind, words)


def print_help(prog: str, description: str) -> None:
    """Print all options and keys of a run with type, default and meaning, the common keys first."""
    print(f"usage: {prog} [FILE.toml ...] [--section.key VALUE ...] [OPTION ...]\n\n{description.strip()}")
    print(f"\noptions:\n{_options_help(RunOptions())}")
    sections = {each.name: getattr(Config(), each.name) for each in fields(Config)}
    docs = {section: _docs_of(type(values)) for section, values in sections.items()}
    print("\ncommon keys:\n  All keys follow below, section by section.\n")
    for key in COMMON:
        section, _, name = key.partition(".")
        print(_key_help(sections[section], key, docs[section][name].split(". ")[0].rstrip(".") + "."))
    for section, values in sections.items():
        print(f"\n{section}:\n{_wrapped(inspect.getdoc(type(values)) or '', 2)}")
        print()
        for each in fields(values):
            print(_key_help(values, f"{section}.{each.name}", docs[section][each.name]))


def _key_help(values: Any, key: str, text: str) -> str:
    """Return a key of the config with its type, meaning and default. values: its section. text: its meaning."""
    name = key.partition(".")[2]
    [item] = [each for each in fields(values) if each.name == name]
    option = f"--{key}"
    if get_origin(item.type) is dict:
        option += ".NAME"
    else:
        text += _default_text(getattr(values, name))
    return _entry(f"{option} {_value_name(item.type)}{',...' * (get_origin(item.type) is tuple)}", text)


def exit_with(main: Callable[..., int], *arguments: object) -> NoReturn:
    """Call main and exit with what it returns; print no traceback when the reader of a pipe is gone, as in `... |
    head`.
    """
    try:
        try:
            code: int | str | None = main(*arguments)
        except SystemExit as end:  # of --help
            code = end.code
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more as it ends
        code = READER_GONE
    sys.exit(code)


def _split(words: list[str], options: type) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the TOML files, and the keys of the config with their values."""
    files: list[str] = []
    overrides: list[tuple[str, str]] = []
    kinds, rest = key_types(), list(words)
    while rest:
        word = rest.pop(0)
        key, has_value, value = word.removeprefix("--").replace("-", "_").partition("=")
        if not word.startswith("--"):
            if not word.endswith(".toml"):
                what = f'"{word}" ({COMMAND_LINE}) must be a TOML file or an option'
                is_verls = word.lstrip("+~").partition(".")[0] in VERL_SECTIONS
                raise ConfigError(f"{what}; {OF_VERL if is_verls else 'write --section.key VALUE, or FILE.toml'}.")
            files.append(word)
            continue
        if " " in key:
            raise ConfigError(f'"{word}" ({COMMAND_LINE}) is one word; write {word} without quotes around it.')
        if "." not in key:
            raise unknown_option(options, word, _key_of_name(key, kinds))
        if has_value:
            value = word.partition("=")[2]
        elif kinds.get(key) is bool and (not rest or rest[0] not in ("true", "false")):
            value = "true"  # --model.packed without a value
        elif rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        else:
            raise ConfigError(f"--{key} ({COMMAND_LINE}) has no value; write --{key} VALUE.")
        overrides.append((key, value))
    return files, overrides


def _key_of_name(name: str, keys: Iterable[str]) -> str:
    """Return how to write what was given as an option, for an error: the keys of that name, or how keys are written."""
    found = [f"--{key}" for key in keys if key.partition(".")[2] == name]
    return f"write {' or '.join(found)}" if found else "config keys are written --section.key VALUE"


def _check_options(options: RunOptions, config: Config) -> None:
    """Check combinations of options, and derive nproc_per_node if it is not given."""
    hosts, lists = options.nnodes, len(options.cuda_visible_devices)
    ranks = config.parallel.dp * config.parallel.tp * config.parallel.pp
    unused = f"({COMMAND_LINE}) is for --dry-run; add it"
    even = f"must divide the mesh of {ranks} ranks, got {hosts}; or give --nproc-per-node"
    each = f"must be given once, or once for each of --nnodes {hosts}, got {lists}"
    for kept, option, text in (
        (options.dry_run or options.check or not lists, "cuda-visible-devices", unused),
        (hosts >= 1, "nnodes", f"must be at least 1, got {hosts}"),
        (options.nproc_per_node >= 0, "nproc-per-node", f"must be at least 0, got {options.nproc_per_node}"),
        (lists in (0, 1, hosts), "cuda-visible-devices", each),
        (options.nproc_per_node or ranks % max(hosts, 1) == 0, "nnodes", even),
    ):
        if not kept:
            raise ConfigError(f"--{option} {text}.")
    options.nproc_per_node = options.nproc_per_node or ranks // hosts


def _parse_known(kind: type[T], words: Sequence[str]) -> tuple[T, list[str]]:
    parser = Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for each in fields(kind):  # type: ignore[arg-type]
        parser.add_argument(_option(each.name), dest=each.name, **_reading(each.type))
    given, rest = parser.parse_known_args(list(words))
    tuples = {each.name for each in fields(kind) if get_origin(each.type) is tuple}  # type: ignore[arg-type]
    return kind(**{name: tuple(value) if name in tuples else value for name, value in vars(given).items()}), rest


def _options_help(defaults: Any) -> str:
    """Return the help of the options that are the fields of a dataclass, given an instance with the default values."""
    docs = _docs_of(type(defaults))
    lines = [_wrapped(inspect.getdoc(type(defaults)) or "", 2), ""]
    for each in fields(defaults):
        value = "" if each.type is bool else _value_name(each.type)
        text = docs[each.name] + _default_text(getattr(defaults, each.name))
        lines.append(_entry(f"{_option(each.name)} {value}", text))
    return "\n".join(lines)


def _entry(name: str, text: str) -> str:
    return f"  {name.rstrip()}\n{_wrapped(text, 6)}"


def _wrapped(text: str, indent: int) -> str:
    width, margin = min(shutil.get_terminal_size().columns, WIDEST), " " * indent
    return textwrap.fill(text, width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)


def _default_text(default: Any) -> str:
    return f" (default: {toml_value(default)})" if default is not None else ""


def unknown_option(kind: type, word: str, otherwise: str) -> ConfigError:
    """Return the error for a word that is none of the options. It names the nearest one, or says `otherwise`."""
    name, options = word.partition("=")[0], [_option(each.name) for each in fields(kind)]
    return ConfigError(f"{name} ({COMMAND_LINE}) is not an option; {nearest(name, options, otherwise)}.")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _reading(kind: Any) -> dict[str, Any]:
    """Return how argparse reads a value of this type."""
    if kind is bool:
        return {"action": "store_true"}
    if get_origin(kind) is tuple:
        return _reading(get_args(kind)[0]) | {"nargs": "+", "action": "extend"}
    if get_origin(kind) is list:
        return _reading(get_args(kind)[0]) | {"action": "append"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if isinstance(kind, types.UnionType):
        return _reading(get_args(kind)[0])

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {KINDS[kind]}, got '{text}'") from None

    return {"type": read}


def _value_name(kind: Any) -> str:
    """Return what --help prints for a value of this type."""
    if get_origin(kind) in (tuple, list) or isinstance(kind, types.UnionType):
        return _value_name(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) is dict:
        return "VALUE"
    return "[true|false]" if kind is bool else kind.__name__.upper()


def _docs_of(kind: type) -> dict[str, str]:
    """Return the text below each field of a dataclass and of its bases, by the field's name."""
    return {name: text for each in reversed(kind.__mro__[:-1]) for name, text in _own_docs(each)}


def _own_docs(kind: type) -> Iterator[tuple[str, str]]:
    [node] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    for statement, below in zip(node.body, node.body[1:], strict=False):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and is_text:
            yield statement.target.id, " ".join(str(below.value.value).split())  # type: ignore[attr-defined]
