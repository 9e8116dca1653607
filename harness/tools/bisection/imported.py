"""What a candidate's Python imports as the package: whether it can, and from which file."""

import subprocess
from itertools import takewhile
from pathlib import Path

from packaging.utils import canonicalize_name

from harness.runtime.events import working
from harness.tools.bisection.question import Question, is_python
from harness.tools.run_tree import run_tree
from harness.tools.trial.environment import module_of
from harness.tools.trial.failure import find_failure
from harness.tools.trial.trial import Trial

_MODULES = """
import sys
here = [] if sys.path[0] else [sys.path.pop(0)]  # a file there may have the name of one of these
import importlib, importlib.metadata as m, importlib.util, re
sys.path[:0] = here
same = lambda name: re.sub(r"[-_.]+", "-", name).lower() == sys.argv[1]
named = [n for n, found in m.packages_distributions().items() if any(map(same, found)) and n.isidentifier()]
for name in {sys.argv[2]} & {*named} or named or [sys.argv[2]]:
"""
"""Goes through the modules of a package; its arguments are the package's normal name and that of its module, as far as
that is known."""
_IMPORT = f"{_MODULES}    importlib.import_module(name)"
_FIND = f"""{_MODULES}
    spec = importlib.util.find_spec(name)
    print(f"{{name}} is {{spec.origin if spec else 'not found'}}")
"""
IMPORT_SECONDS = 300.0


def import_failure(trial: Trial, python: str, lock: int) -> str:
    """Return why the candidate's package cannot be imported here; "" if it can. Such a candidate cannot be judged.

    lock: descriptor of the bisect's lock.
    """
    package, log = trial.package, trial.folder / "import.txt"
    command = [python, "-c", _IMPORT, canonicalize_name(package), module_of(package)]
    doing = f"importing {package}, as what cannot be imported is not bad"
    with log.open("wb") as output, working(doing):
        ended = run_tree(command, output=output, env=trial.variables, cwd="/", timeout=IMPORT_SECONDS, inherit=(lock,))
    if not ended.code and not ended.timed_out:
        return ""
    return find_failure(log, trial.folder / "none", ended.code, package).text or f"exit code {ended.code}"


def imported_by(trial: Trial, python: str, question: Question) -> str:
    """Return the file from which the candidate's Python imports the package if it starts where the command's does.

    `python -c` puts the current folder first on the path, as `python SCRIPT` does the script's.
    """
    package, (first, *rest) = trial.package, question.command
    main = next((Path(question.folder) / word for word in [first, *rest] if word.endswith(".py")), None)
    folder = main.parent if main and main.is_file() else question.folder
    options = takewhile(lambda word: word.startswith("-") and word not in ("-m", "-c"), rest)
    flags = options if is_python(Path(first).name) else ()
    command = [python, *flags, "-c", _FIND, canonicalize_name(package), module_of(package)]
    found = subprocess.run(command, capture_output=True, text=True, env=trial.variables, cwd=folder)
    return " and ".join(found.stdout.split("\n")[:-1]) or f"{package} is not known"
