"""The words of a verl command: as they are given, or from a script that can be read without a shell.

Such a script has NAME=value lines, `set` lines, comments, and one command of verl.trainer.main_ppo. Nothing of it is
executed.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from harness.config.layers import ConfigError
from harness.runtime import redact

PRINTING = "--cfg job --resolve"
"""The options of hydra with which verl prints its config instead of training."""
MAIN = re.compile(r"(?:\S*/)?verl[./]trainer[./]main_ppo(?:\.py)?")
OTHER_MAIN = re.compile(r"(?:verl|recipe)[./][\w./]*main_\w+(?:\.py)?|(?:verl|recipe)\.[\w.]*(?:trainer|main)[\w.]*")
_QUOTED = r"""'[^']*'|"(?:\\.|[^"\\])*"|\\."""
_LINE_PART = re.compile(
    rf"(?P<continued>\\\n)|(?P<comment>(?<!\S)\#[^\n]*)|(?P<end>\n)|{_QUOTED}|[^\s\\'\"]+|.", re.DOTALL
)
_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?[A-Za-z_]\w*=")
_SUBSTITUTED = re.compile(r"""\s*(?:export\s+)?(?P<name>[A-Za-z_]\w*)=("?)(?:\$\(.*\)|`.*`|\$\{.*\})\2\s*""")
_SET = re.compile(r"\s*set\s+[-+].*")
NAMES = ("trainer.project_name", "trainer.experiment_name")
"""Keys that decide nothing, so that a part of their values may stay unread."""
_VARIABLE = r"\$(?:(?P<name>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)\})"
_WORD_PART = re.compile(
    rf"""(?P<literal>'[^']*'|\\.)|(?P<arguments>"\$@"|\$@)|"(?P<quoted>(?:\\.|[^"\\])*)\""""
    rf"""|{_VARIABLE}|(?P<shell>[$`;|&<>()])""",
    re.DOTALL,
)
_IN_QUOTES = re.compile(rf"\\(?P<escaped>[$`])|{_VARIABLE}|(?P<shell>[$`])")


class NeedsShell(ConfigError):
    """A line of a script that only a shell can read."""


def words_of_command(words: Sequence[str]) -> list[str]:
    """Return what follows verl.trainer.main_ppo in a command; words that are all overrides are returned as given.

    Raise ConfigError for other words.
    """
    for number, word in enumerate(words):
        if MAIN.fullmatch(word):
            return [*words[number + 1 :]]
    other = next((word for word in words if OTHER_MAIN.fullmatch(word)), "")
    if other:
        raise ConfigError(f"{other} is another trainer; only verl.trainer.main_ppo can be translated.")
    if words and all("=" in word or word.startswith(("~", "--config")) for word in words):
        return [*words]
    what = "these are" if words else "there are"
    raise ConfigError(f"{what} no arguments of verl; give python3 -m verl.trainer.main_ppo KEY=VALUE ... after --.")


def words_of_script(
    text: str, arguments: Sequence[str] = (), environment: Mapping[str, str] = os.environ, name: str = "run.sh"
) -> list[str]:
    """Return the words after verl.trainer.main_ppo in the script `name`.

    `arguments` take the place of "$@"; in a script without it, they come last. Of a variable whose value needs a shell,
    as $(date), the name stands in the names of a project and a run, and nowhere else. Raise ConfigError for a variable
    that is not set, and for what needs a shell otherwise, with the command that lets verl print its config instead.
    """
    is_shown = {name: redact.variable(name, value) == value for name, value in environment.items()}
    variables = {name: value if is_shown[name] else "redacted" for name, value in environment.items()}
    found: list[list[str]] = []
    unread: dict[str, str] = {}
    for line in _lines(text):
        try:
            if _ASSIGNMENT.match(line) and not MAIN.search(line):
                variables |= _assigned(line, variables)
            elif not _SET.fullmatch(line):
                found.append(_command(line, variables, arguments))
        except NeedsShell as error:
            if substituted := _SUBSTITUTED.fullmatch(line):
                variables[substituted["name"]] = reference = f"${{{substituted['name']}}}"
                unread[reference] = line
                continue
            raise ConfigError(f"{name}: {error}; {_print_by_script(name, arguments)}") from error
    for words in found:
        for number, word in enumerate(words):
            for reference, line in unread.items():
                if reference in word and not word.startswith(NAMES):
                    raise ConfigError(f'{name}: "{_start(line)}" needs a shell; {_print_by_script(name, arguments)}')
                words[number] = words[number].replace(reference, reference[2:-1])
    if len(found) != 1:
        raise ConfigError(f"{name} has {len(found)} commands of verl.trainer.main_ppo; give one of them after --.")
    return found[0] if "$@" in text else [*found[0], *arguments]


def print_instead(words: Sequence[str]) -> str:
    """Return the end of an error: what to do where only verl can tell the values of these words after main_ppo."""
    return _print_by(f"{shlex.join(['python3', '-m', 'verl.trainer.main_ppo', *words])} {PRINTING}")


def _print_by_script(name: str, arguments: Sequence[str]) -> str:
    edit = rf"s#verl.trainer.main_ppo(\.py)?#& {PRINTING}#"
    bash = shlex.join(["bash", "-s", "--", *arguments]) if arguments else "bash"
    return _print_by(f"sed -E '{edit}' {shlex.quote(name)} | {bash}")


def _print_by(command: str) -> str:
    file = "job.yaml"
    return f"let verl print its config, and give that: {command} > {file} && python3 launch/from_verl.py {file}"


def _lines(text: str) -> Iterator[str]:
    """Yield the lines that are not empty, without comments; a line that ends in a backslash goes on in the next."""
    line = ""
    for part in _LINE_PART.finditer(text.replace("\r\n", "\n") + "\n"):
        if part["end"] is None:
            line += "" if part["continued"] or part["comment"] else part[0]
        else:
            if line.strip():
                yield line
            line = ""


def _assigned(line: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return what a line of assignments sets."""
    words = _split(_expand(line, variables, arguments=None))
    words = words[1:] if words[0] == "export" else words
    if not all(map(_ASSIGNMENT.match, words)):
        raise NeedsShell(f'"{_start(line)}" is a command, and nothing is run')
    return dict(word.split("=", 1) for word in words)


def _command(line: str, variables: Mapping[str, str], arguments: Sequence[str]) -> list[str]:
    """Return the words after verl.trainer.main_ppo."""
    words = _split(_expand(line, variables, arguments))
    if any(MAIN.fullmatch(word) or OTHER_MAIN.fullmatch(word) for word in words):
        return words_of_command(words)
    raise NeedsShell(f'"{_start(line)}" is another command than verl\'s, and nothing is run')


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise NeedsShell(f'"{_start(line)}" has a quote that is not closed') from error


def _expand(line: str, variables: Mapping[str, str], arguments: Sequence[str] | None) -> str:
    """Return a line for shlex, with values in place of $NAME and "$@".

    As in a shell, a value without quotes around it is several words; but not in an assignment, where arguments is None.
    """

    def value(match: re.Match[str]) -> str:
        name = match["name"] or match["braced"]
        if name not in variables:
            raise ConfigError(f"${name} is not set; set it in the environment, or in a line above the command.")
        return variables[name]

    def shell(match: re.Match[str]) -> NeedsShell:
        return NeedsShell(
            f'"{_start(line[match.start() :] if match.re is _WORD_PART else match.string)}" needs a shell'
        )

    def in_quotes(match: re.Match[str]) -> str:
        if match["shell"]:
            raise shell(match)
        return match["escaped"] or f'"{shlex.quote(value(match))}"'

    def part(match: re.Match[str]) -> str:
        if match["literal"]:
            return match[0]
        if match["shell"] or (match["arguments"] and arguments is None):
            raise shell(match)
        if match["arguments"]:
            return shlex.join(arguments or ())
        if match["quoted"] is not None:
            return f'"{_IN_QUOTES.sub(in_quotes, match["quoted"])}"'
        return shlex.quote(value(match)) if arguments is None else shlex.join(value(match).split())

    return _WORD_PART.sub(part, line)


def _start(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."
