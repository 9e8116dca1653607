"""The words of a verl command: as given, or from a shell script that bash expands without starting anything in it."""

import fcntl
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from harness.config.layers import ConfigError
from harness.runtime import redact
from harness.tools.verl.confine import confine
from harness.tools.verl.xargs import commands_of_xargs

MAIN = re.compile(r"(?:\S*/)?verl[./]trainer[./]main_ppo(?:\.py)?")
_IN_TEXT = re.compile(r"\s-m\s+verl\.trainer\.main_ppo\s")
OTHER_MAIN = re.compile(r"(?:verl|recipe)[./][\w./]*main_\w+(?:\.py)?|(?:verl|recipe)\.[\w.]*(?:trainer|main)[\w.]*")
SECONDS = 20
BACKGROUND_SECONDS = 5
"""How long a script may take, and what it leaves in the background after its end."""
OWN_FDS = 50
"""The first file descriptor that is ours in the process of a script; it may open any below."""
_PRELUDE = Path(__file__).with_name("expand.bash")

_QUOTED = r"""'[^']*'|"(?:\\.|[^"\\])*"|\\."""
_FILE = rf"""(?:{_QUOTED}|\$\([^()]*\)|\$\{{[^{{}}]*\}}|\$(?![({{])|[^\s;|&()<>'"\\$])+"""
_INSIDE = r"\((?:[^()\n]|\([^()\n]*\))*\)"
"""What stands in brackets, as the command of >(tee LOG)."""
_COUNTED = re.compile(
    r"\$\{(?:#(?P<all>\w+(?:\[[@*]\])?)\}|(?P<cut>\w+(?:\[[@*]\])?):(?![-=?+])"
    r"|(?P<name>\w+)\[(?P<index>(?![@*]\])(?:[-\w$ +*/%]|\$\{\w+\})+)\](?P<whole>\})?)"
)
"""The start of ${#NAME}, ${#NAME[@]}, ${NAME:FROM:LENGTH} and ${NAME[INDEX]}."""
_QUOTED_OR_REDIRECTION = re.compile(
    rf"""{_QUOTED}|\[\[\s.{{0,2000}}?\]\]|\(\(.{{0,2000}}?\)\)|(?P<comment>(?<![^\s;])\#[^\n]*)"""
    rf"""|(?P<output>(?<![^\s;)])(?:[0-9]|&)?>{{1,2}}[|]?[ \t]*(?:>{_INSIDE}|(?![&(>]){_FILE}))"""
    rf"""|(?P<input>(?<![<>=&$({{])<[ \t]*(?![&(<>])(?P<file>{_FILE}))"""
    rf"|(?P<counted>{_COUNTED.pattern})",
    re.DOTALL,
)
"""A redirection to or from a file, or text that may look like one; and what counts words or letters."""
_CONTENT = re.compile(rf"(?P<open>\$\(|`)\s*<[ \t]*(?P<file>{_FILE})\s*(?P<close>\)|`)")
"""$(<FILE): what a file holds."""
_PATH = re.compile(r"(?<![\w$])PATH=")
_OWN_PATH = re.compile(r"\$\{BASH_SOURCE(?:\[0\])?(?::-[^{}]*)?\}|\$BASH_SOURCE\b")
"""The script's own path. $0 has it too, and exists in a script that is no file."""
_INPUT = rf"(?:\{{\w+\}}|[0-9]+)?<{{1,3}}&?[ \t]*(?:<\(cat [^\n]*?\)|{_FILE})"
_BETWEEN = r"(?:[ \t]|\\\n)+"
_PYTHON_AT = re.compile(
    rf"(?<![^\s;|&(])(?>{_FILE})(?={_BETWEEN}(?:-[a-zA-Z]+{_BETWEEN}){{0,8}}verl\.trainer\.main_ppo\b)"
)
"""The Python of verl's command. Restricted bash would refuse it if it is given by its path."""
_EXEC = re.compile(rf"(?<![\w$./-])exec(?=(?:[ \t]+{_INPUT})+[ \t]*(?:[;\n&|)}}#]|\Z))")
"""An exec that only opens files to read, once _without_redirections has rewritten them."""
_DIGITS = {0x0E + digit: str(digit) for digit in range(10)}
"""The characters that expand.bash writes an id with -> digits."""
_HOLE = re.compile("\2([\x0e-\x17]+)\3\n?|\2[\x0e-\x17]*\3?|[\x0e-\x17]+\3?|\3")
"""What expand.bash prints in place of a command's output: the id of its process; or what is left of that in ${NAME%?}."""
_OVERRIDE = re.compile(r"[+~]{0,2}\w+(?:\.\w+)+=.*", re.DOTALL)
_CUT_OFF = "does not reach verl: a comment, or a space after a backslash, ends the command before it"
_READ = "\4"
"""The mark with which expand.bash prefixes what it read from the standard input of xargs."""
_STUCK = re.compile(r"error token|not a valid identifier")
"""An error of bash after which a variable is not set: in arithmetic, or in the name of a variable."""
_SET_UP = ("activate", "conda.sh", ".bashrc", ".bash_profile", ".profile", "set_env.sh")
"""Files that a script sources to choose its Python or its drivers, and not to set variables of the command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hole:
    """A place of the command that cannot be known, because it depends on something that was not run or read."""

    text: str
    """The word of the command, with $(...) in place of what is missing; or the command that may have set anything."""
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class VerlCommand:
    """The words after verl.trainer.main_ppo, and what else the script would have done."""

    words: tuple[str, ...]
    not_run: tuple[str, ...] = ()
    """The other commands of the script, and the errors of bash."""
    holes: tuple[Hole, ...] = ()


def command_of_words(words: Sequence[str]) -> VerlCommand:
    """Return the arguments of verl.trainer.main_ppo among a command's words; words that are all overrides are returned as given.

    Raise ConfigError for other words.
    """
    for number, word in enumerate(words):
        if MAIN.fullmatch(word):
            return VerlCommand(words=tuple(words[number + 1 :]))
    other = next((word for word in words if OTHER_MAIN.fullmatch(word)), "")
    if other:
        raise ConfigError(f"{other} is another trainer; only verl.trainer.main_ppo can be translated.")
    if words and all("=" in word or word.startswith(("~", "--config")) for word in words):
        return VerlCommand(words=tuple(words))
    what = "these are" if words else "there are"
    raise ConfigError(f"{what} no arguments of verl; give python3 -m verl.trainer.main_ppo KEY=VALUE ... after --.")


def command_of_script(text: str, arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> VerlCommand:
    """Return verl's command in a shell script, with the words that `script.sh ARGUMENTS` would give it.

    Bash expands the script, but starts no command of it and writes no file; see expand.bash. Raise ConfigError if there is no
    bash, the script does not end, or it does not have exactly one command of verl.trainer.main_ppo.
    """
    commands, said = _run_by_bash(_without_redirections(text), arguments, environment)
    named = {process: _HOLE.sub("$(...)", " ".join(_own(words))) for process, words in commands}
    commands = [(process, words) for process, whole in commands for words in _with_input(process, whole)]

    def with_commands(text: str) -> str:
        return _HOLE.sub(lambda match: f"$({named.get((match[1] or '').translate(_DIGITS), '...')})", text)

    stuck = [with_commands(line) for line in said if _HOLE.search(line) and _STUCK.search(line)]
    said = [with_commands(line) for line in said]
    found: list[list[str]] = []
    others: list[list[str]] = []
    for _, words in commands:
        (found if any(MAIN.fullmatch(word) for word in words) else others).append(words)
    not_run = [*(with_commands(" ".join(words)) for words in others if _does_something(words)), *said]
    if len(found) > 1:
        raise ConfigError(f"the script has {len(found)} commands of verl.trainer.main_ppo; give one of them after --.")
    if not found:
        other = next((word for words in others for word in words if OTHER_MAIN.fullmatch(word)), "")
        if other:
            raise ConfigError(f"{other} is another trainer; only verl.trainer.main_ppo can be translated.")
        inner = [word for words in others for word in words if _IN_TEXT.search(word)]
        if len(inner) == 1 and "$" not in inner[0]:  # as of bash -c "...", which the script's own bash has expanded
            return command_of_script(inner[0], (), environment)
        if inner:
            raise ConfigError("verl's command is in a text for another shell; save that text as a script and give it.")
        why = f" (it says: {' '.join(said[-2:])}); set what it asks for, or" if said else ";"
        raise ConfigError(
            f"no command of the script is python3 -m verl.trainer.main_ppo{why} give its command after --."
        )
    command = command_of_words(found[0])
    unknown = "is the output of a command that was not run; verl's default is used"
    holes = [Hole(text=with_commands(word), why=unknown) for word in command.words if _HOLE.search(word)]
    holes += [
        Hole(text=with_commands(" ".join(words)), why="may set any variable of the script, and was not read")
        for words in others
        if _sets_variables(words)
    ]
    holes += [Hole(text=words[0], why=_CUT_OFF) for words in others if words and _OVERRIDE.fullmatch(words[0])]
    holes += [Hole(text=line, why="needs the output of a command that was not run") for line in stuck]
    whole = tuple(word for word in command.words if not _HOLE.search(word))
    return VerlCommand(words=whole, not_run=tuple(not_run), holes=tuple(dict.fromkeys(holes)))


def _run_by_bash(
    text: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Return the process id and the words of every command that is not a builtin of bash, and the errors of bash."""
    bash = shutil.which("bash")
    if bash is None:
        raise ConfigError("reading a script needs bash, which is not on PATH; give the command after --.")
    # A script may copy a variable into its command, and so into the TOML.
    kept = {
        name: value if redact.variable(name, value) == value else "redacted"
        for name, value in environment.items()
        if not name.startswith("BASH_") and name not in ("ENV", "HISTFILE")
    }
    with ExitStack() as files:
        written, errors = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        trace = files.enter_context(open(os.devnull, "wb"))
        # A script opens 3, 4, ... itself.
        record_fd, trace_fd = (fcntl.fcntl(each.fileno(), fcntl.F_DUPFD_CLOEXEC, OWN_FDS) for each in (written, trace))
        files.callback(os.close, record_fd)
        files.callback(os.close, trace_fd)
        prelude = _PRELUDE.read_text(encoding="utf-8")
        prelude = prelude.replace("RECORD_FD", str(record_fd)).replace("TRACE_FD", str(trace_fd))
        all_have_ended, held = os.pipe()
        held_until_the_end = fcntl.fcntl(held, fcntl.F_DUPFD_CLOEXEC, OWN_FDS)
        os.close(held)
        try:
            process = subprocess.Popen(
                [bash, "--norc", "--noprofile", "-r", "-c", prelude + text, "bash", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=kept | {"PATH": os.devnull},
                pass_fds=(record_fd, trace_fd, held_until_the_end),
                start_new_session=True,
                preexec_fn=confine,
            )
        except subprocess.SubprocessError as error:
            os.close(all_have_ended)
            raise ConfigError("this kernel cannot confine a script (no seccomp); give the command after --.") from error
        finally:
            os.close(held_until_the_end)
        try:
            has_ended = bool(select.select([os.pidfd_open(process.pid)], [], [], SECONDS)[0])
            if has_ended:  # verl's command may be in the background
                select.select([all_have_ended], [], [], BACKGROUND_SECONDS)
        finally:
            os.killpg(
                process.pid, signal.SIGKILL
            )  # before the wait: then the kernel may give the id to another process
            process.wait()
            select.select([all_have_ended], [], [], BACKGROUND_SECONDS)
            os.close(all_have_ended)
        if not has_ended:
            raise ConfigError(f"the script did not end within {SECONDS} s; give the command after --.")
        written.seek(0)
        errors.seek(0)
        record, said = written.read().decode(errors="replace"), errors.read().decode(errors="replace")
    lines = filter(None, said.splitlines())
    return _commands_in(record), [re.sub(r"^(\S*bash|environment): (line \d+: )?", "bash: ", line) for line in lines]


def _commands_in(record: str) -> list[tuple[str, list[str]]]:
    """Return the commands that expand.bash has recorded, in the order in which they ended."""
    commands: list[tuple[str, list[str]]] = []
    unfinished: dict[str, list[str]] = {}
    for line in record.split("\0")[:-1]:
        process, _, word = line.partition(":")
        if word == "\1":
            commands.append((process, unfinished.pop(process, [])))
        else:
            unfinished.setdefault(process, []).append(word)
    return commands


def _own(words: Iterable[str]) -> list[str]:
    """Return the words of a command without what its xargs would read."""
    return [word for word in words if not word.startswith(_READ)]


def _with_input(process: str, words: Sequence[str]) -> list[list[str]]:
    """Return the commands that verl's command becomes by xargs, with a hole if its words are unknown; others as they are."""
    own = _own(words)
    if "xargs" not in own or not any(MAIN.fullmatch(word) or _IN_TEXT.search(word) for word in own):
        return [own]
    at = own.index("xargs")
    found = commands_of_xargs(own[at + 1 :], "\0".join(word[1:] for word in words if word.startswith(_READ)))
    hole = f"\2{process.translate({ord(digit): place for place, digit in _DIGITS.items()})}\3"
    return [[*own, hole]] if found is None else [[*own[:at], *each] for each in found]


def _without_redirections(text: str) -> str:
    """Return a script without redirections to files and comments, and without changes of PATH.

    Restricted bash would refuse the whole command. What the script reads from a file comes from a `cat` that is not run.
    A hole stands for any number of words and letters, so that what counts them is a hole too.
    """

    def with_hole(match: re.Match[str]) -> str:
        if match["all"]:
            return f'$(hole_or {match[0]} "${{{match["all"]}-}}")'
        if match["cut"]:
            return f'$(hole_or "" "${{{match["cut"]}-}}"){match[0]}'
        element, hole = f"{match['name']}[{match['index']}]", f'hole_or "" "${{{match["name"]}[@]-}}"'
        return f"${{{element}-$({hole})}}" if match["whole"] else f"$([[ -v {element} ]] || {hole}){match[0]}"

    def keep(match: re.Match[str]) -> str:
        if match["counted"] or match[0][0] in '"([':
            return _COUNTED.sub(with_hole, match[0])
        if match["input"]:
            return "" if match["file"] == "/dev/null" else f"< <(cat {match['file']})"
        return "" if match["output"] or match["comment"] else match[0]

    text = _CONTENT.sub(r"\g<open>cat \g<file>\g<close>", text.replace("\r\n", "\n"))
    text = _OWN_PATH.sub("$0", text)
    text = _PYTHON_AT.sub(lambda match: "python3" if re.search(r"[/$]", match[0]) else match[0], text)
    text = _EXEC.sub("command exec", _QUOTED_OR_REDIRECTION.sub(keep, text))
    return _PATH.sub("PATH_OF_SCRIPT=", text)


def _does_something(words: Iterable[str]) -> bool:
    """Return whether a command is worth naming: not one that shows text, or asks what is installed."""
    name, *rest = [*words, ""]
    return (
        name.rsplit("/", 1)[-1] not in ("", "tee", "cat", "read", "mapfile", "mkdir", "sleep", "which", "nvidia-smi")
        and "-c" not in rest
    )


def _sets_variables(words: Sequence[str]) -> bool:
    """Return whether a command may set variables of the script: a sourced file, or a command that is itself unknown."""
    name, *rest = [*words, ""]
    return bool(_HOLE.match(name)) or (name in ("source", ".") and rest[0].rsplit("/", 1)[-1] not in _SET_UP)
