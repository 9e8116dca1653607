"""The words of a verl command: from a shell script, which bash expands and in which nothing is started, or as given."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.config.layers import ConfigError
from harness.runtime import redact

MAIN = re.compile(r"(?:\S*/)?verl[./]trainer[./]main_ppo(?:\.py)?")
OTHER_MAIN = re.compile(r"(?:verl|recipe)[./][\w./]*main_\w+(?:\.py)?|(?:verl|recipe)\.[\w.]*(?:trainer|main)[\w.]*")
SECONDS = 20

# Restricted bash writes no file and starts nothing with a slash in its name; with an empty PATH no other name is found,
# and bash hands the words of each command to this function, in a process of its own: its id before each word, which is one
# write, so that the commands of a pipe do not mix; \1 after the last.
_PRELUDE = (
    # set -x of `python3 ... 2>&1 | tee LOG` writes into a pipe that nothing reads.
    r"""trap '' PIPE; command_not_found_handle() { local w; for w; do builtin printf '%s:%s\0' "$BASHPID" "$w" >&FD; done; """
    r"""builtin printf '%s:\1\0' "$BASHPID" >&FD; """
    r"""[[ "$1 $*" != *python*' -c '* && $1 != which && $1 != npu-smi && $1 != rocm-smi ]]; }; """
    r"""date() { case "${1-}" in +*) builtin printf "%(${1#+})T\n" -1 ;; *) builtin printf '%(%c)T\n' -1 ;; esac; }; """
    r"""cd() { :; }; exec() { "$@"; }; kill() { :; }; hash() { return 1; }; """
    r"""source() { command_not_found_handle source "$@"; }; .() { command_not_found_handle source "$@"; }"""
    "\n"
)
_QUOTED_OR_REDIRECTION = re.compile(
    r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|\[\[\s.*?\]\]|\(\(.*?\)\)|(?P<comment>(?<![^\s;])\#[^\n]*)"""
    r"""|(?P<redirection>(?<![^\s;)])(?:(?:[0-9]|&)?>{1,2}[|]?[ \t]*(?![&(>])|[0-9]?<[ \t]*(?![&(<]))[^\s;|&)]+)""",
    re.DOTALL,
)
"""What hides a redirection, or is one; to a file, restricted bash would refuse it with the whole command."""
_PATH = re.compile(r"(?<![\w$])PATH=")


@dataclass(frozen=True, kw_only=True, slots=True)
class VerlCommand:
    """The words after verl.trainer.main_ppo, and what else the script would have done."""

    words: tuple[str, ...]
    not_run: tuple[str, ...] = ()
    """Other commands of the script, and what bash said."""


def command_of_words(words: Sequence[str], not_run: Sequence[str] = ()) -> VerlCommand:
    """Return the arguments of verl's main in a command's words; words that are all overrides are taken as they are.

    Raise ConfigError where there is neither.
    """
    for number, word in enumerate(words):
        if MAIN.fullmatch(word):
            return VerlCommand(words=tuple(words[number + 1 :]), not_run=tuple(not_run))
    other = next((word for word in words if OTHER_MAIN.fullmatch(word)), "")
    if other:
        raise ConfigError(f"{other} is another trainer; only verl.trainer.main_ppo is translated.")
    if words and all("=" in word or word.startswith(("~", "--config")) for word in words):
        return VerlCommand(words=tuple(words), not_run=tuple(not_run))
    what = "the command has" if words else "there are"
    raise ConfigError(f"{what} no arguments of verl; give python3 -m verl.trainer.main_ppo KEY=VALUE ... after --.")


def command_of_script(text: str, arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> VerlCommand:
    """Return the command of verl's main in a shell script, expanded by bash as a run of `script.sh ARGUMENTS` would.

    Nothing else that the script names is started, no file is written, redirections to files are left out. Raise ConfigError
    where bash is missing, the script does not end, or it has no such command, or more than one.
    """
    commands, said = _run_by_bash(_without_redirections(text), arguments, environment)
    found: list[list[str]] = []
    others: list[list[str]] = []
    for words in commands:
        (found if any(MAIN.fullmatch(word) for word in words) else others).append(words)
    not_run = [*(" ".join(words) for words in others if _does_something(words)), *said]
    if len(found) > 1:
        raise ConfigError(f"the script has {len(found)} commands of verl.trainer.main_ppo; give one of them after --.")
    if not found:
        other = next((word for words in others for word in words if OTHER_MAIN.fullmatch(word)), "")
        if other:
            raise ConfigError(f"{other} is another trainer; only verl.trainer.main_ppo is translated.")
        why = f" (it says: {' '.join(said[-2:])}); set what it asks for, or" if said else ";"
        raise ConfigError(
            f"no command of the script is python3 -m verl.trainer.main_ppo{why} give its command after --."
        )
    return command_of_words(found[0], not_run)


def _run_by_bash(
    text: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[list[str]], list[str]]:
    """Return the words of every command that is not bash's own, and bash's complaints."""
    bash = shutil.which("bash")
    if bash is None:
        raise ConfigError("a script is expanded by bash, which is not on PATH; give the command after --.")
    # A script may write what it is given into its command.
    kept = {
        name: value if redact.variable(name, value) == value else "redacted"
        for name, value in environment.items()
        if not name.startswith("BASH_") and name != "ENV"
    }
    with tempfile.TemporaryFile() as written:
        prelude = _PRELUDE.replace("FD", str(written.fileno()))
        try:
            done = subprocess.run(
                [bash, "--norc", "--noprofile", "-r", "-c", prelude + text, "bash", *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=kept | {"PATH": os.devnull},
                pass_fds=(written.fileno(),),
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"the script has not ended after {SECONDS} s; give the command after --.") from error
        written.seek(0)
        record = written.read().decode(errors="replace")
    commands: list[list[str]] = []
    unfinished: dict[str, list[str]] = {}
    for line in record.split("\0")[:-1]:
        process, _, word = line.partition(":")
        if word == "\1":
            commands.append(unfinished.pop(process, []))
        else:
            unfinished.setdefault(process, []).append(word)
    lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line and not line.startswith("+")]
    return commands, [re.sub(r"^\S*bash: (line \d+: )?", "bash: ", line) for line in lines]


def _without_redirections(text: str) -> str:
    def keep(match: re.Match[str]) -> str:
        return "" if match["redirection"] or match["comment"] else match[0]

    return _PATH.sub("PATH_OF_SCRIPT=", _QUOTED_OR_REDIRECTION.sub(keep, text.replace("\r\n", "\n")))


def _does_something(words: Iterable[str]) -> bool:
    """Whether a command is worth naming: not one that shows text, or asks for what is installed."""
    name, *rest = [*words, ""]
    return (
        name.rsplit("/", 1)[-1] not in ("", "tee", "cat", "mkdir", "sleep", "which", "nvidia-smi") and "-c" not in rest
    )
