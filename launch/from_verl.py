"""Translate a config of verl into one of this harness: the same PPO, started by torchrun, without Ray.

    python3 launch/from_verl.py -- python3 -m verl.trainer.main_ppo data.train_batch_size=1024 ... > run.toml
    python3 launch/from_verl.py --out run.toml run_qwen2-7b.sh trainer.total_epochs=1
    python3 -m verl.trainer.main_ppo ... --cfg job --resolve > job.yaml
    python3 launch/from_verl.py --tiny --hosts 2 --out tiny.toml job.yaml

Give the config that verl prints, as in the third line; or a command after --; or a script and its arguments, if no
shell is needed to read it: NAME=value lines and verl's command. Each override, and each printed value that is not
verl's default, is mapped, irrelevant here, unsupported (with what it would change) or unknown. Keys that a command does
not set have verl's defaults. Exit codes: 0 written, and nothing is missing; 1 written, but something is unsupported,
unknown or refused by the harness; 2 it cannot be read, or verl refuses it.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import _checkout

_checkout.use()

from harness.config.layers import ConfigError
from harness.runtime.errors import report_user_error
from harness.runtime.installed import as_typed
from harness.task.tiny_models import ARCHITECTURES
from harness.tools import environments
from harness.tools.command_line import exit_with, read_known_options
from harness.tools.verl.overrides import Release
from harness.tools.verl.plain_script import words_of_command, words_of_script
from harness.tools.verl.printed_config import is_printed_config, values_of
from harness.tools.verl.translate import Translation, launch_lines, summary, translate, translate_printed


@dataclass(kw_only=True)
class FromVerlOptions:
    """Options before the file, or before --."""

    out: str = ""
    """File to write the config to. Default: standard output."""
    release: Release = "auto"
    """Release of verl whose keys and defaults count; auto: the newest that has the keys."""
    tiny: Literal["", "auto", "qwen2", "qwen3", "llama", "qwen3_moe", "deepseek_v3", "moonlight"] = ""
    """Use a tiny model (--tiny alone: of the architecture that the path names), the arithmetic task, small batches and
    three steps; all parallel sizes stay."""
    hosts: int = 0
    """Also print the command that runs it on this many emulated hosts."""


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    try:
        options, script, command = read(arguments)
        if options.hosts < 0:
            raise ConfigError(f"--hosts must be at least 1, got {options.hosts}.")
        found = translation(options, script, command)
        lines = launch_lines(found, options.out or "run.toml", options.hosts)
        if options.out:
            write(options.out, found.toml)
    except (ValueError, OSError) as error:
        return report_user_error(error, rank=0)
    if not options.out:
        print(found.toml, end="")
    advice = [] if options.out else ["Save it as run.toml, or give --out run.toml; then:"]
    print(
        summary(found),
        *advice,
        *(f"+ {as_typed(line)}" for line in lines),
        sep="\n",
        file=sys.stdout if options.out else sys.stderr,
    )
    return 0 if found.is_whole else 1


def read(arguments: list[str]) -> tuple[FromVerlOptions, list[str], list[str]]:
    """Return the options, the file with its arguments, and the command after --. Raise ConfigError for other words."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    before, after = arguments[:split], arguments[split + 1 :]
    # --tiny may stand alone: the word after it may be the file.
    before = [
        "--tiny=auto" if word == "--tiny" and (before[number + 1 : number + 2] or [""])[0] not in TINY else word
        for number, word in enumerate(before)
    ]
    own = leading_options(before)
    options, rest = read_known_options(FromVerlOptions, "launch/from_verl.py [FILE ...]", __doc__ or "", before[:own])
    if rest:
        raise ConfigError(f"{rest[0]} is not an option; launch/from_verl.py --help lists them.")
    script = before[own:]
    if script and split < len(arguments):
        raise ConfigError(f"give either the file {script[0]} or a command after --, not both.")
    return options, script, after


def translation(options: FromVerlOptions, script: list[str], command: list[str]) -> Translation:
    """Translate the file, or the command if there is no file. Raise ConfigError if it cannot be read."""
    if not script:
        return translate(words_of_command(command), options.release, options.tiny)
    name, *words = script
    text = text_of(name)
    if not is_printed_config(text):
        return translate(words_of_script(text, words, os.environ, name), options.release, options.tiny)
    if words:
        raise ConfigError(f"{name} has all values; give {words[0]} to verl's command as it prints them.")
    environments.need("yaml")
    return translate_printed(values_of(text, name), options.release, options.tiny)


TINY = ("auto", *ARCHITECTURES)
VALUED = ("--out", "--release", "--tiny", "--hosts")


def leading_options(words: list[str]) -> int:
    """Return how many words are options and their values. A file and its arguments follow them."""
    number = 0
    while number < len(words) and words[number].startswith("-"):
        number += 2 if words[number] in VALUED else 1
    return min(number, len(words))


def text_of(name: str) -> str:
    """Return the text of a file. Raise ConfigError if it cannot be read."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be read: {error.strerror}; give a script, the YAML that verl prints, or a command after --."
        ) from error


def write(name: str, text: str) -> None:
    """Write the config. Raise ConfigError if the file cannot be written."""
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        where = "give --out a file in a folder that exists and may be written"
        raise ConfigError(f"--out {name} cannot be written: {error.strerror}; {where}.") from error


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
