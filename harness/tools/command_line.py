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
    OLD_VALUES,
    VERL_SECTIONS,
    ConfigError,
    Layer,
    apply_layers,
    key_types,
    left_out,
    nearest,
    override_layer,
    read_layer,
    toml_value,
)
from harness.config.mistakes import KeysRead, Mistake, refuse
from harness.config.resolve import SECTIONS, resolve
from harness.config.rules import in_ranges
from harness.config.schema import Config
from harness.runtime.installed import as_typed
from harness.tools.environments import shipped
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
    """A command line that was read."""

    config: Config
    options: RunOptions
    files: tuple[str, ...]
    """The TOML files."""
    overrides: tuple[tuple[str, str], ...]
    """The keys that --section.key VALUE sets, over the files."""
    reading: KeysRead
    """Who set which key, and what is wrong with the words themselves. Rules about values are resolve()'s."""


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
    """Read a command line as read_command does. Raise ConfigError for all that is wrong with it on any machine.

    sections: those of the config that the script uses.
    """
    command = read_command(arguments, script_options, base)
    # For what it refuses; a run fills in "auto" once it knows its facts.
    resolve(command.config, sections=sections, reading=command.reading)
    return command


def read_command(arguments: Sequence[str], script_options: type | None = None, base: Sequence[Layer] = ()) -> Command:
    """Read `[FILE.toml ...] [--section.key VALUE ...] [--dry-run ...]`.

    Raise ConfigError where the config cannot be known at all: for files that cannot be read, and options with wrong
    values. Other mistakes are in the result, so that they can be told together with those that need more facts.

    script_options: the options that the script itself has read, for the hint at the nearest one.
    base: layers that were read already; files and options come over them.
    """
    options, rest = _parse_known(RunOptions, arguments)
    words = _split(rest, script_options or RunOptions)
    if options.inject:
        words.overrides = [pair for pair in words.overrides if pair[0] != "run.inject"]
        words.overrides.append(("run.inject", json.dumps(options.inject)))
    layers = [*base, *_read_files(words), override_layer(words.overrides)]
    config, reading = apply_layers(layers)
    reading = reading.plus(words.mistakes)
    if not base:
        reading = reading.plus(left_out(config))
    judged, out_of_range = in_ranges(config)
    if "parallel" not in reading.spoilt_sections | {each.key.partition(".")[0] for each in out_of_range}:
        reading = reading.plus([*_wrong_faults(judged), *_wrong_options(options, judged)])
    return Command(config, options, tuple(words.files), tuple(words.overrides), reading)


def _read_files(words: "_Words") -> list[Layer]:
    """Read the TOML files. Raise ConfigError for all that cannot be read, and what else is wrong with the words."""
    layers = []
    for file in words.files:
        try:
            layers.append(read_layer(shipped(file)))
        except ConfigError as error:
            words.mistakes.append(Mistake(str(error)))
    if len(layers) < len(words.files):
        refuse(KeysRead(mistakes=tuple(words.mistakes)))
    return layers


def _wrong_faults(config: Config) -> Iterator[Mistake]:
    for text in config.run.inject:
        try:
            check_fault(text, config)
        except ValueError as error:
            yield Mistake(f'run.inject = "{text}" cannot work: {error}.', "run.inject")


def refuse_plan_options(options: RunOptions) -> None:
    """Raise ConfigError for options by which only launch/ppo.py plans a run."""
    if options.dry_run or options.check or options.cuda_visible_devices or options.nnodes != 1:
        raise ConfigError("--dry-run, --check and what belongs to them are options of launch/ppo.py; leave them out.")


def refuse_numbers_of_ranks(words: Sequence[str], remedy: str) -> None:
    """Raise ConfigError for options of a plan that torchrun has too, in the command line of a run that is no plan."""
    if given := [
        each for each in ("--nnodes", "--nproc-per-node") if any(word.split("=")[0] == each for word in words)
    ]:
        raise ConfigError(f"{given[0]} is for --dry-run and --check; {remedy}.")


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
        print(as_typed(f"usage: {prog} [OPTION ...]\n\n{description.strip()}"), "options:", sep="\n\n")
        print(_options_help(kind()))
        raise SystemExit(0)
    return _parse_known(kind, words)


def print_help(prog: str, description: str) -> None:
    """Print all options and keys of a run with type, default and meaning, the common keys first."""
    words = "[FILE.toml ...] [--section.key VALUE ...] [OPTION ...]"
    print(as_typed(f"usage: {prog} {words}\n\n{description.strip()}"))
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


@dataclass(kw_only=True, slots=True)
class _Words:
    """The words of a command line that are not options."""

    files: list[str] = field(default_factory=list)
    overrides: list[tuple[str, str]] = field(default_factory=list)
    """Keys of the config with their values."""
    mistakes: list[Mistake] = field(default_factory=list)


def _split(words: list[str], options: type) -> _Words:
    """Return the TOML files, the keys of the config with their values, and what is neither."""
    found = _Words()
    kinds, rest = key_types(), list(words)
    while rest:
        word = rest.pop(0)
        key, has_value, _ = word.removeprefix("--").replace("-", "_").partition("=")
        value_follows = bool(rest) and not rest[0].startswith("--")
        if not word.startswith("--"):
            if word.endswith(".toml"):
                found.files.append(word)
            else:
                found.mistakes.append(Mistake(_neither(word)))
        elif " " in key:
            what = f'"{word}" ({COMMAND_LINE}) is one word; write {word} without quotes around it.'
            found.mistakes.append(Mistake(what, spoils=(key.partition(" ")[0],)))
        elif "." not in key:
            found.mistakes.append(Mistake(str(unknown_option(options, word, _key_of_name(key, kinds)))))
            if value_follows and not has_value and not rest[0].endswith(".toml"):
                rest.pop(0)
        elif has_value:
            found.overrides.append((key, word.partition("=")[2]))
        elif kinds.get(key) is bool and (not rest or rest[0] not in ("true", "false", *OLD_VALUES.get(key, ()))):
            found.overrides.append((key, "true"))  # --model.packed without a value
        elif value_follows:
            found.overrides.append((key, rest.pop(0)))
        else:
            what = f"--{key} ({COMMAND_LINE}) has no value; write --{key} VALUE."
            found.mistakes.append(Mistake(what, key, spoils=(key,)))
    return found


def _neither(word: str) -> str:
    """Return the sentence about a word that is neither a file nor an option."""
    what = f'"{word}" ({COMMAND_LINE}) must be a TOML file or an option'
    is_verls = word.lstrip("+~").partition(".")[0] in VERL_SECTIONS
    return f"{what}; {OF_VERL if is_verls else 'write --section.key VALUE, or FILE.toml'}."


def _key_of_name(name: str, keys: Iterable[str]) -> str:
    """Return how to write what was given as an option, for an error: the keys of that name, or how keys are written."""
    found = [f"--{key}" for key in keys if key.partition(".")[2] == name]
    return f"write {' or '.join(found)}" if found else "config keys are written --section.key VALUE"


def _wrong_options(options: RunOptions, config: Config) -> Iterator[Mistake]:
    """Yield combinations of options that cannot be. If there are none, derive nproc_per_node unless it is given."""
    hosts, lists = options.nnodes, len(options.cuda_visible_devices)
    ranks = config.parallel.dp * config.parallel.tp * config.parallel.pp
    unused = f"({COMMAND_LINE}) is for --dry-run; add it"
    even = f"must divide the mesh of {ranks} ranks, got {hosts}; or give --nproc-per-node"
    each = f"must be given once, or once for each of --nnodes {hosts}, got {lists}"
    wrong = [
        Mistake(f"--{option} {text}.")
        for kept, option, text in (
            (options.dry_run or options.check or not lists, "cuda-visible-devices", unused),
            (hosts >= 1, "nnodes", f"must be at least 1, got {hosts}"),
            (options.nproc_per_node >= 0, "nproc-per-node", f"must be at least 0, got {options.nproc_per_node}"),
            (lists in (0, 1, hosts), "cuda-visible-devices", each),
            (options.nproc_per_node or ranks % max(hosts, 1) == 0, "nnodes", even),
        )
        if not kept
    ]
    yield from wrong
    if not wrong:
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
    return textwrap.fill(as_typed(text), width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)


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
