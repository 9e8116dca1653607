"""Whether a command tests the candidate: it must run with the candidate's Python, and import the candidate's files.

Other files hide the candidate's where Python looks first: in the folder of the script, in the current folder for
`python -m` and pytest, or in a folder of PYTHONPATH.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import Path

from packaging.utils import canonicalize_name

from harness.tools.bisection.installation import Environment, module_of
from harness.tools.bisection.question import (
    PYTHON_PROGRAMS,
    TORCHRUN,
    Options,
    Question,
    command_of,
    is_of_this_repository,
    is_python,
    is_torchrun,
    script_of,
)

_PROBE = """
import sys
sys.path[:1] = [] if sys.path[0] == "" else sys.path[:1]
import importlib.metadata as m, importlib.util, json, os, re
sys.path[:0] = sys.argv[3:]
def file_of(name):
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return os.path.realpath(spec.origin) if spec and spec.origin else None
names = [sys.argv[2]]
if sys.argv[1] and not file_of(names[0]) and hasattr(m, "packages_distributions"):
    same = lambda name: re.sub(r"[-_.]+", "-", name).lower() == sys.argv[1]
    names = [n for n, found in m.packages_distributions().items() if any(map(same, found)) and n.isidentifier()]
print(json.dumps({name: file_of(name) for name in names if file_of(name)}))
"""
"""Prints module -> the file from which it would be imported. Arguments: the package's normal name, or "" if the second one is
surely a module's name; a module's name; folders that go first on the path."""


class AnotherWouldRun(Exception):
    """The command would not test the candidate; one sentence says what it would run, and what to do."""


def check_command(question: Question, environment: Environment, cpu_mode: bool) -> None:
    """Raise AnotherWouldRun if the command would not run with this environment's Python and package.

    Modules are looked for and not imported. A package without a file, such as a namespace, is not checked.
    """
    variables = environment.variables(cpu_mode, is_of_this_repository(question))
    _check_program(question, environment.python, variables["PATH"])
    folders, isolation = entry_folders(question), _isolation(question)
    for name, file in _files_of_candidate(question.options, environment).items():
        command = [environment.python, *isolation, "-c", _PROBE, "", name, *map(str, folders)]
        found = _ask(command, variables, question.folder)
        seen = file if found is None else found.get(name, "")
        if seen != file:
            remedy = "take it off PYTHONPATH"
            if _is_in(seen, folders):
                remedy = "move the script out of that folder, or start the bisect in another one"
            elif isolation:
                remedy = f"leave out {' '.join(isolation)}, with which Python ignores PYTHONPATH"
            what = f"import {name} from {seen}, and not from {file}" if seen else f"not find {name} in {file}"
            raise AnotherWouldRun(f"the command would {what}; {remedy}.")


def _files_of_candidate(options: Options, environment: Environment) -> dict[str, str]:
    """Return module -> file, as far as the candidate's Python finds any. Raises AnotherWouldRun if all are elsewhere."""
    words = [canonicalize_name(options.package), module_of(options.package)]
    alone = environment.variables(cpu_mode=False) | {"PYTHONPATH": os.pathsep.join(environment.paths)}
    found = _ask([environment.python, "-c", _PROBE, *words], alone, "/") or {}
    own = {name: file for name, file in found.items() if not environment.paths or _is_in(file, environment.paths)}
    if found and not own:
        name, file = next(iter(found.items()))
        remedy = "; give --git the folder of the checkout that holds it" if options.git else ""
        raise AnotherWouldRun(f"it has no {name}, so that {file} would be tested{remedy}.")
    return own


def entry_folders(question: Question) -> list[Path]:
    """Return the folders that Python, torchrun or pytest put first on the path when they run the command."""
    (first, *rest), script = question.command, script_of(question)
    is_safe = bool(os.environ.get("PYTHONSAFEPATH")) or any(set("PI") & set(word) for word in _flags(question))
    found = [] if is_safe else _folder_of_main(question, script)
    module = next((at for at, words in enumerate(pairwise(rest)) if words == ("-m", "pytest")), None)
    if Path(first).name == "pytest":
        found += _folders_of_pytest(Path(question.folder), rest)
    elif is_python(Path(first).name) and script is None and module is not None:
        found += _folders_of_pytest(Path(question.folder), rest[module + 2 :])
    return found


def _folder_of_main(question: Question, script: Path | None) -> list[Path]:
    """Return the folder of the script that is run, or the current one for `python -m` and `-c`; none for other programs."""
    folder, words = Path(question.folder), list(question.command)
    if script and script != TORCHRUN:
        return [script.parent]
    if not (is_python(Path(words[0]).name) or is_torchrun(question)):
        return []
    if is_torchrun(question):  # the folder of its ranks counts, and not its own
        starts = (
            at for at, word in enumerate(words) if word.startswith("torch.distributed.") or word.endswith("torchrun.py")
        )
        words = words[next(starts, 0) :]
    main = next((word for word in words[1:] if word in ("-m", "-c") or word.endswith(".py")), "")
    return [folder] if main.startswith("-") else [(folder / main).resolve().parent] if main else []


def _folders_of_pytest(folder: Path, words: Sequence[str]) -> list[Path]:
    """Return what pytest adds by default: for each test file and conftest.py the folder above its outermost package."""
    if "--import-mode=importlib" in words:
        return []
    given = [folder / word.partition("::")[0] for word in words if not word.startswith("-")]
    starts = [each if each.is_dir() else each.parent for each in given if each.exists()] or [folder]
    above = [each for start in starts for each in start.parents if each.is_relative_to(folder)]
    holders = [*starts, *(each for each in above if (each / "conftest.py").is_file())]
    return list(dict.fromkeys(map(_outside_of_packages, holders)))


def _outside_of_packages(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if not (each / "__init__.py").is_file())


def _flags(question: Question) -> list[str]:
    """Return the flags directly after `python`, such as -I or -P; none if the command is not a Python."""
    first, *rest = question.command
    flags = takewhile(lambda word: re.fullmatch(r"-[bBdEiIOPqRsSuvx]+", word), rest)
    return list(flags) if is_python(Path(first).name) else []


def _isolation(question: Question) -> list[str]:
    """Return the options with which Python ignores PYTHONPATH."""
    return [word for word in _flags(question) if set("IE") & set(word)]


def _ask(command: Sequence[str], variables: Mapping[str, str], folder: str) -> dict[str, str] | None:
    """Return what the probe prints; None if Python does not start there, which the run itself will show."""
    run = subprocess.run(command, capture_output=True, text=True, env=dict(variables), cwd=folder)
    try:
        return dict(json.loads(run.stdout)) if run.returncode == 0 else None
    except ValueError:
        return None


def _is_in(file: str, folders: Sequence[str | Path]) -> bool:
    """Return whether a module's file is found in one of these folders of the path."""
    root = Path(file).parents[1 if Path(file).stem == "__init__" else 0] if file else None
    return root in {Path(each).resolve() for each in folders}


def _check_program(question: Question, python: str, path: str) -> None:
    """Raise AnotherWouldRun if the command's program is missing, or is a script that another Python runs."""
    first, options = question.command[0], question.options
    if command_of(question, python, Path("/"))[0] == python:
        return
    name, is_pinned = Path(first).name, not (options.git or options.environments or options.only_package)
    add = f"add it with {f'--hold {name}' if is_pinned else f'{python} -m pip install {name}'}"
    programs = Path(python).parent
    found = shutil.which(Path(question.folder) / first if os.sep in first else first, path=path)
    if not found:
        raise AnotherWouldRun(f"there is no {first} in {programs} or on PATH; {add}.")
    other = _interpreter_of(Path(found), path)
    if other and _prefix_of(other) != _prefix_of(python):
        is_installed = Path(found).parent == Path(other).parent
        remedy = f"give it as {name}, and {add}" if is_installed else f"give: -- python {found}"
        raise AnotherWouldRun(f"{found} runs with {other}, and not with the candidate's {python}; {remedy}.")
    if not other and name in PYTHON_PROGRAMS and Path(found).parent.resolve() != programs.resolve():
        raise AnotherWouldRun(f"there is no {name} in {programs}, and {found} may run another Python; {add}.")


def _interpreter_of(script: Path, path: str) -> str:
    """Return the Python in a script's shebang, or "" if it has none."""
    try:
        with script.open("rb") as stream:
            first, second = (stream.readline(1024).decode(errors="replace").strip() for _ in range(2))
    except OSError:  # a program may be run and not read
        return ""
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    if words and Path(words[0]).name == "env":
        words = [shutil.which(word, path=path) or "" for word in words[1:] if is_python(word)]
    elif second.startswith("'''exec'"):  # how installers name a long path
        words = [word.strip("\"'") for word in second.split()[1:]]
    return words[0] if words and is_python(Path(words[0]).name) else ""


def _prefix_of(python: str) -> str:
    """Return what tells one Python with its packages from another, whatever links name it; "" if it does not start."""
    command = [python, "-I", "-c", "import sys; print(sys.prefix, sys.version_info[:2])"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout
    except OSError:
        return ""
