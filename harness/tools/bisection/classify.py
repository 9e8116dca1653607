"""One run of the command and its verdict: good, bad, skip, or other (it failed, but not as --match or --hang ask)."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from signal import SIGKILL, Signals

from packaging.utils import canonicalize_name

from harness.runtime.errors import CANNOT_RUN_HERE
from harness.runtime.events import working
from harness.tools.bisection.failure_causes import find_failure, shorten
from harness.tools.bisection.installation import Environment, module_of
from harness.tools.bisection.question import Pause, Question, command_of, is_of_this_repository, is_python, is_torchrun
from harness.tools.bisection.search import Verdict
from harness.tools.bisection.state import FOLDER_MODE, Attempt
from harness.tools.diagnose.entries import catalogue
from harness.tools.diagnose.log_lines import lines_of
from harness.tools.run_tree import SupervisorKilled, run_tree

_EXIT_CODE = re.compile(r"\s*exitcode\s*:\s*(-?\d+)\b")
FIRST_STOPPING_CODE = 128
LOG = "log.txt"
_LACKS_A_GPU = re.compile(
    r"found no nvidia driver|not compiled with cuda|no cuda gpus are available|libcuda(rt|)\.so|libcudnn|libnvrtc|libnccl"
    r"|sgl_kernel.*import-only stand-in|cannot import name .* from '(sgl_kernel|torchvision)|cuda driver (version|initialization)"
    r"|no module named '(sgl_kernel|flashinfer|vllm|torch_memory_saver|deep_gemm|flash_attn|torchaudio|torchcodec)\b"
    r"|sgl-?kernel is required|only (works|supported) on cuda|operator torchvision::",
    re.IGNORECASE,
)
_MAY_PASS = re.compile(
    r"EADDRINUSE|address already in use|no space left on device|cannot allocate memory|temporary failure in name resolution"
    r"|too many open files|connection reset by peer|read timed out",
    re.IGNORECASE,
)
"""Failures that a busy machine causes, whatever the release."""
_NEED_A_GPU = ("update-needs-nvidia-driver", "sgl-kernel-missing")
"""Known failures that appear only on a machine without a GPU."""


_MODULES = """
import sys
here = [] if sys.path[0] else [sys.path.pop(0)]  # a file there may have the name of one of these
import importlib.metadata as m, importlib.util, re
sys.path[:0] = here
same = lambda name: re.sub(r"[-_.]+", "-", name).lower() == sys.argv[1]
named = [n for n, found in m.packages_distributions().items() if any(map(same, found)) and n.isidentifier()]
modules = {sys.argv[2]} & {*named} or named or [sys.argv[2]]
"""
"""Finds the modules of a package; its arguments are the package's normal name and that of its module, as far as that is
known."""
_IMPORT = (
    _MODULES
    + """
for name in modules:
    importlib.import_module(name)
"""
)
_FIND = (
    _MODULES
    + """
for name in modules:
    spec = importlib.util.find_spec(name)
    print(f"{name} is {spec.origin if spec else 'not found'}")
"""
)
IMPORT_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """What to run, and where."""

    question: Question
    environment: Environment
    folder: Path
    """For everything that the run leaves."""
    candidate: str = ""
    no_gpu: bool
    lock: int
    """Descriptor of the bisect's lock. Every process of the run inherits it, so a resumed bisect waits for them."""
    limit: float = 0.0
    """Seconds after which the run counts as hanging; 0: never."""

    def variables(self) -> dict[str, str]:
        """Return the command's variables."""
        question = self.question
        return self.environment.variables(self.no_gpu and question.runs_sglang, is_of_this_repository(question))


def run_once(run: Run) -> Attempt:
    """Run the command and classify it.

    Raises Pause if the script asks to stop, OSError.
    """
    question, environment, log = run.question, run.environment, run.folder / LOG
    run.folder.mkdir(FOLDER_MODE, parents=True)
    variables, command = run.variables(), command_of(question, environment.python, run.folder)
    made = Attempt(code=-SIGKILL, timed_out=False, seconds=0.0, verdict="skip", log=str(log))
    program = Path(question.folder) / command[0] if os.sep in command[0] else command[0]
    if not shutil.which(program, path=variables["PATH"]):
        made.reason = f"there is no {command[0]} in {Path(environment.python).parent} or on PATH"
        return made
    try:
        with log.open("wb") as output:
            ended = run_tree(
                command,
                output=output,
                env=variables | {"BISECT_CANDIDATE": run.candidate},
                cwd=question.folder,
                timeout=run.limit,
                inherit=(run.lock,),
            )
    except SupervisorKilled:
        made.may_pass, made.reason = True, "it kills the process that watches it"
        return made
    made.timed_out, made.seconds = ended.timed_out, ended.seconds
    reports = ended.code == 1 and is_torchrun(question)  # any other command's own exit code is its answer
    made.code = (reports and first_code(log)) or ended.code
    if made.code >= FIRST_STOPPING_CODE and not made.timed_out:
        raise Pause(f"the script asked to stop, with exit code {made.code}; its output is in {log}.")
    if made.code and not made.timed_out:
        made.failure = find_failure(log, run.folder / "run", made.code, question.options.package)
        text = made.failure.text
        for path in (*environment.paths, str(Path(environment.python).parent.parent)):
            text = text.replace(f"{path}/", "")
        made.failure = replace(made.failure, text=text)
        made.may_pass = bool(_MAY_PASS.search(text)) and made.code != CANNOT_RUN_HERE
    made.verdict, made.reason = _classify(run, made)
    return made


def import_failure(run: Run) -> str:
    """Return why the candidate's package cannot be imported here; "" if it can. Such a candidate cannot be judged."""
    package, log = run.question.options.package, run.folder / "import.txt"
    doing = f"{run.candidate}: importing {package}, as what cannot be imported is not bad"
    with log.open("wb") as output, working(doing):
        ended = run_tree(
            [run.environment.python, "-c", _IMPORT, canonicalize_name(package), module_of(package)],
            output=output,
            env=run.environment.variables(run.no_gpu and run.question.runs_sglang),
            cwd="/",
            timeout=IMPORT_SECONDS,
            inherit=(run.lock,),
        )
    if not ended.code and not ended.timed_out:
        return ""
    return find_failure(log, run.folder / "none", ended.code, package).text or f"exit code {ended.code}"


def imported_by(run: Run) -> str:
    """Return the file from which the candidate's Python imports the package if it starts where the command's does.

    `python -c` puts the current folder first on the path, as `python SCRIPT` does the script's.
    """
    package, (first, *rest) = run.question.options.package, run.question.command
    main = next((Path(run.question.folder) / word for word in [first, *rest] if word.endswith(".py")), None)
    folder = main.parent if main and main.is_file() else run.question.folder
    options = takewhile(lambda word: word.startswith("-") and word not in ("-m", "-c"), rest)
    flags = options if is_python(Path(first).name) else ()
    command = [run.environment.python, *flags, "-c", _FIND, canonicalize_name(package), module_of(package)]
    found = subprocess.run(command, capture_output=True, text=True, env=run.variables(), cwd=folder)
    return " and ".join(found.stdout.split("\n")[:-1]) or f"{package} is not known"


def first_code(log: Path) -> int:
    """Return the exit code of the rank that failed first, by torchrun's report; torchrun itself exits with 1 for
    any. 0 if a signal ended that rank, or there is no report.
    """
    code, follows = 0, False
    for line in lines_of(str(log)):
        if "Root Cause (first observed failure)" in line.whole:
            follows = True
        elif follows and (match := _EXIT_CODE.match(line.whole)):
            code, follows = int(match[1]), False
    return max(code, 0)


def _classify(run: Run, made: Attempt) -> tuple[Verdict, str]:
    question = run.question
    if made.timed_out:
        return "other" if question.kind == "match" else "bad", f"it ran longer than {run.limit:.0f} s"
    if made.code == CANNOT_RUN_HERE:
        return "skip", f"cannot run here: {made.failure.text or 'the script said so, with exit code 125'}"
    if made.code == 0:
        return "good", "it passed"
    reason = describe(made)
    if question.kind == "match" and (line := _matching_line(question.options.match, made, run.folder / LOG)):
        made.failure = replace(made.failure, text=line)
        return "bad", line
    lacks_a_gpu = _LACKS_A_GPU.search(made.failure.text) or made.failure.slug in _NEED_A_GPU
    if run.no_gpu and lacks_a_gpu:
        return "skip", f"cannot run here: {reason}"
    return "bad" if question.kind == "failure" else "other", reason


def describe(made: Attempt) -> str:
    """Return how a failed run ended, for people."""
    if made.code < 0 and not made.failure.text:
        return f"it was killed by {Signals(-made.code).name}"
    if not made.failure.text:
        return f"it ended with exit code {made.code} and printed nothing"
    if made.failure.text.startswith("its last line"):
        return f"it ended with exit code {made.code}; {made.failure.text}"
    return made.failure.text


def _matching_line(wanted: str, made: Attempt, log: Path) -> str:
    """Return the line of a failed run's log that shows what --match asks for; "" if none does."""
    if wanted in catalogue():
        return made.failure.text if made.failure.slug == wanted else ""
    return next((shorten(line.text) for line in lines_of(str(log)) if re.search(wanted, line.whole)), "")
