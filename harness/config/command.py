"""The command line of launch/ppo.py: TOML files, dotted overrides, and what to do instead of a run."""

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from harness.config.layers import COMMAND_LINE, ConfigError, build_config, free_tables, override_layer, read_layer
from harness.config.options import help_text
from harness.config.rules import check
from harness.config.schema import Config


@dataclass(kw_only=True)
class Options:
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
    """A fault on purpose, KIND@PHASE[:rank][:step]; may be given more than once. Replaces run.inject."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A parsed command line, its config checked."""

    config: Config
    options: Options


def parse(arguments: Sequence[str]) -> Command:
    """Read `[FILE.toml ...] [--section.key VALUE ...] [--dry-run ...]`. Raises ConfigError for anything else."""
    files: list[str] = []
    overrides: list[tuple[str, str]] = []
    options = Options()
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            files.append(_config_file(word))
            continue
        name, has_value, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if name in ("dry_run", "json", "check") and not has_value:
            setattr(options, name, True)
            continue
        if "." not in name:
            _check_option_name(name)
        if not has_value:
            value = _next_value(name, rest)
        if "." in name:
            overrides.append((name, value))
        else:
            _set_option(options, name, value)
    if options.inject:
        overrides = [each for each in overrides if each[0] != "run.inject"]
        overrides.append(("run.inject", json.dumps(options.inject)))
    config = build_config([*(read_layer(file) for file in files), override_layer(overrides)])
    check(config)
    _check_options(options, config)
    return Command(config=config, options=options)


def print_help(prog: str, description: str) -> None:
    """All keys with type, default and meaning."""
    tables = ", ".join(f"--{key}.NAME VALUE" for key in free_tables())
    sections = {each.name: type(getattr(Config(), each.name)) for each in fields(Config)}
    text = help_text(prog, f"{description}\nFree tables: {tables}.", {"options": Options, **sections})
    print(text.replace("[OPTION ...]", "[FILE.toml ...] [--section.key VALUE ...] [OPTION ...]", 1))


def _config_file(word: str) -> str:
    if not word.endswith(".toml"):
        raise ConfigError(
            f'"{word}" ({COMMAND_LINE}) is neither a TOML file nor an option; write --section.key VALUE, or FILE.toml.'
        )
    return word


def _next_value(name: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"--{name} ({COMMAND_LINE}) has no value; write --{name} VALUE.")
    return rest.pop(0)


def _check_option_name(name: str) -> None:
    known = [item.name for item in fields(Options)]
    if name not in known:
        match = difflib.get_close_matches(name, known, n=1)
        hint = f"the nearest is --{match[0]}" if match else "config keys are written --section.key VALUE"
        raise ConfigError(f"--{name} ({COMMAND_LINE}) is not an option; {hint}.")


def _set_option(options: Options, name: str, value: str) -> None:
    if name == "cuda_visible_devices":
        options.cuda_visible_devices.append(value)
    elif name == "inject":
        options.inject.append(value)
    elif name == "gpu_memory_gib":
        options.gpu_memory_gib = _gibibytes(name, value)
    elif name in ("nnodes", "nproc_per_node"):
        if not value.isdecimal() or int(value) < 1:
            raise ConfigError(
                f"--{name} = {value!r} ({COMMAND_LINE}) is not a count; write a whole number of at least 1."
            )
        setattr(options, name, int(value))
    else:
        raise ConfigError(f"--{name} = {value!r} ({COMMAND_LINE}) takes no value; write --{name} alone.")


def _gibibytes(name: str, value: str) -> float:
    try:
        size = float(value)
    except ValueError:
        size = 0.0
    if not 0 < size < float("inf"):
        raise ConfigError(f"--{name} = {value!r} ({COMMAND_LINE}) is no size; write a number above 0, such as 80.")
    return size


def _check_options(options: Options, config: Config) -> None:
    if options.json and not options.dry_run:
        raise ConfigError(f"--json ({COMMAND_LINE}) has nothing to print; add --dry-run.")
    if options.gpu_memory_gib and not options.dry_run:
        raise ConfigError(f"--gpu_memory_gib ({COMMAND_LINE}) is for an estimate; add --dry-run.")
    lists = len(options.cuda_visible_devices)
    if lists > 1 and lists != options.nnodes:
        raise ConfigError(
            f"--cuda_visible_devices ({COMMAND_LINE}) is given {lists} times for --nnodes {options.nnodes};"
            " give it once, or once a host."
        )
    if options.nproc_per_node == 0:
        ranks = config.parallel.dp * config.parallel.tp * config.parallel.pp
        if ranks % options.nnodes:
            raise ConfigError(
                f"--nnodes = {options.nnodes} ({COMMAND_LINE}) does not divide the mesh of {ranks} ranks; give --nproc_per_node."
            )
        options.nproc_per_node = ranks // options.nnodes
