"""Translate a verl command into a config of this harness: the same PPO, started by torchrun, without Ray.

    python3 launch/from_verl.py -- python3 -m verl.trainer.main_ppo data.train_batch_size=1024 ... > run.toml
    python3 launch/from_verl.py --out run.toml run_qwen2-7b.sh trainer.total_epochs=1
    python3 launch/from_verl.py --tiny --hosts 2 --out tiny.toml - < run_qwen2-7b.sh

Give the command after --, or a script (- for standard input) and its arguments. Bash expands a script without starting
anything in it. Each override is mapped, irrelevant here, unsupported (with what it would change) or unknown. Keys that the
command does not set have verl's defaults. Exit codes: 0 written, and nothing is missing; 1 written, but something is unsupported
or unknown, or depends on the release; 2 the command cannot be read.
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
from harness.task.tiny_models import ARCHITECTURES
from harness.tools.command_line import exit_with, read_known_options
from harness.tools.verl.overrides import Release
from harness.tools.verl.shell_script import VerlCommand, command_of_script, command_of_words
from harness.tools.verl.translate import launch_lines, summary, translate


@dataclass(kw_only=True)
class FromVerlOptions:
    """Options before the script, or before --."""

    out: str = ""
    """File to write the config to. Default: standard output."""
    release: Release = "auto"
    """Release of verl whose keys and defaults count; auto: the newest that accepts most overrides."""
    tiny: Literal["", "auto", "qwen2", "qwen3", "llama", "qwen3_moe", "deepseek_v3", "moonlight"] = ""
    """Use a tiny model (--tiny alone: of the architecture that the path names), the arithmetic task, small batches and three steps; all parallel sizes stay."""
    hosts: int = 0
    """Also print the command that runs it on this many emulated hosts."""


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    try:
        options, command = read(arguments)
        if options.hosts < 0:
            raise ConfigError(f"--hosts must be at least 1, got {options.hosts}.")
        found = translate(command, options.release, options.tiny)
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
        *(f"+ {line}" for line in lines),
        sep="\n",
        file=sys.stdout if options.out else sys.stderr,
    )
    return 0 if found.is_whole else 1


def read(arguments: list[str]) -> tuple[FromVerlOptions, VerlCommand]:
    """Return the options and verl's command. Raise ConfigError if the arguments are not such."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    before, after = arguments[:split], arguments[split + 1 :]
    # --tiny may stand alone: the word after it may be the script.
    before = [
        "--tiny=auto" if word == "--tiny" and (before[number + 1 : number + 2] or [""])[0] not in TINY else word
        for number, word in enumerate(before)
    ]
    own = leading_options(before)
    options, rest = read_known_options(FromVerlOptions, "launch/from_verl.py [SCRIPT ...]", __doc__ or "", before[:own])
    if rest:
        raise ConfigError(f"{rest[0]} is not an option; launch/from_verl.py --help lists them.")
    script = before[own:]
    if script and split < len(arguments):
        raise ConfigError(f"give either the script {script[0]} or a command after --, not both.")
    if not script:
        return options, command_of_words(after)
    text = sys.stdin.read() if script[0] == "-" else script_text(script[0])
    return options, command_of_script(text, script[1:], os.environ)


TINY = ("auto", *ARCHITECTURES)
VALUED = ("--out", "--release", "--tiny", "--hosts")


def leading_options(words: list[str]) -> int:
    """Return how many words are options and their values. A script and its arguments follow them."""
    number = 0
    while number < len(words) and words[number].startswith("-") and words[number] != "-":
        number += 2 if words[number] in VALUED else 1
    return min(number, len(words))


def script_text(name: str) -> str:
    """Return the text of a script. Raise ConfigError if it cannot be read."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}; give a script, or a command after --.") from error


def write(name: str, text: str) -> None:
    """Write the config. Raise ConfigError if the file cannot be written."""
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        where = "give --out a file in a folder that exists and may be written"
        raise ConfigError(f"--out {name} cannot be written: {error.strerror}; {where}.") from error


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
