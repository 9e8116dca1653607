"""A trial: a command, run in an environment, whose end is judged by the signature of a failure."""

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Literal

from harness.config.run_folder import FOLDER_MODE
from harness.runtime.errors import CANNOT, CANNOT_RUN_HERE
from harness.tools.diagnose.entries import catalogue
from harness.tools.diagnose.log_lines import lines_of
from harness.tools.run_tree import Ended, SupervisorKilled, run_tree
from harness.tools.trial.failure import LogFailure, find_failure, shorten

Verdict = Literal["good", "bad", "skip", "other"]
"""skip: it cannot be run here. other: it failed, but not with the failure that the signature looks for."""
LINGER_SECONDS = 15.0
"""Time for a command to end once it has shown all words of its signature: many a dead scheduler leaves a parent that
waits forever."""
_EXIT_CODE = re.compile(r"\s*exitcode\s*:\s*(-?\d+)\b")
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


class _Over(Exception):
    """The command has shown its signature without ending, or has used up its time."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The failure that a trial looks for; by default any."""

    match: str = ""
    """A name of launch/diagnose.py, or a regular expression for a line of the log of a run that failed."""
    hang: bool = False
    """A run that takes longer than its limit."""
    words: tuple[str, ...] = ()
    """Regular expressions that the log must match, all of them, however the run ends."""


@dataclass(kw_only=True)
class Outcome:
    """How one trial ended."""

    code: int
    """The exit code; negative for a signal."""
    timed_out: bool
    seconds: float
    verdict: Verdict
    log: str
    reason: str = ""
    failure: LogFailure = field(default_factory=LogFailure)
    may_pass: bool = False
    """Whether the machine may have caused the failure, for example because a port was in use. Such a trial is repeated
    once."""

    @property
    def ending(self) -> str:
        return f"no end after {self.seconds:.0f} s" if self.timed_out else f"exit code {self.code}"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A command, what it runs with and where, and the failure that it is run for."""

    command: Sequence[str]
    variables: Mapping[str, str]
    cwd: str | Path
    folder: Path
    """For its log, and all else that it leaves."""
    signature: Signature = field(default_factory=Signature)
    limit: float = 0.0
    """Seconds after which it counts as hanging; 0: never."""
    package: str = ""
    """The package whose frames of a traceback count."""
    own: tuple[str, ...] = ()
    """Folders of the environment, which are left out of what is told."""
    is_torchrun: bool = False
    """Whether the command is torchrun, which ends with 1 and reports the exit code of the rank that failed first."""
    no_gpu: bool = False
    """Whether to skip what fails because there is no GPU."""

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    def output(self) -> str:
        """Return all that it has printed so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")


def run_trial(trial: Trial, run: Callable[..., Ended] = run_tree) -> Outcome:
    """Run the command to its end, or a little longer than it needs to show all words of its signature, and judge it.

    run: as run_tree(). Raises OSError.
    """
    began = time.monotonic()
    trial.folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    made = Outcome(code=-SIGKILL, timed_out=False, seconds=0.0, verdict="skip", log=str(trial.log))
    program = Path(trial.cwd) / trial.command[0] if os.sep in trial.command[0] else trial.command[0]
    if not shutil.which(program, path=trial.variables.get("PATH")):
        made.reason = f"there is no {trial.command[0]} in its environment or on PATH"
        return made
    until = {"tick": _until_shown(trial)} if trial.signature.words else {"timeout": trial.limit}
    with trial.log.open("wb") as output:
        options = {"output": output, "env": trial.variables, "cwd": trial.cwd, **until}
        try:
            ended = run(trial.command, **options)
            made.code, made.timed_out, made.seconds = ended.code, ended.timed_out, ended.seconds
        except _Over:
            made.timed_out, made.seconds = True, time.monotonic() - began
        except SupervisorKilled:
            made.may_pass, made.reason = True, "it kills the process that watches it"
            return made
    _judge(trial, made)
    return made


def _until_shown(trial: Trial) -> Callable[[], None]:
    """Return what raises _Over once the limit has passed, or the signature was shown LINGER_SECONDS ago."""
    deadlines = [time.monotonic() + trial.limit]

    def tick() -> None:
        if min(deadlines) < time.monotonic():
            raise _Over
        words = trial.signature.words
        if len(deadlines) == 1 and len(find_words(words, trial.output())) == len(words):
            deadlines.append(time.monotonic() + LINGER_SECONDS)

    return tick


def find_words(words: Sequence[str], output: str) -> list[str]:
    """Return what each of these expressions matches first, on one line; nothing for one that matches nowhere."""
    return [" ".join(match[0].split()) for each in words if (match := re.search(each, output))]


def judge_words(words: Sequence[str], output: str, code: int, ending: str) -> tuple[Verdict, str]:
    """Return the verdict of a program that should show these words if it is broken, and end with 0 and without any of
    them if it is not.
    """
    shown = [f'"{each}"' for each in find_words(words, output)]
    refusal = re.search(rf"^{CANNOT}(.*)", output, re.MULTILINE)
    if code == CANNOT_RUN_HERE and refusal:
        return "skip", refusal[1]
    if len(shown) == len(words):
        return "bad", ", ".join(shown)
    if code:
        return "other", ending
    return ("other", f"it shows {shown[0]}") if shown else ("good", "it passed")


def _judge(trial: Trial, made: Outcome) -> None:
    """Fill in the rest of the outcome from how the command ended and what it printed."""
    if words := trial.signature.words:
        made.verdict, made.reason = judge_words(words, trial.output(), made.code, made.ending)
        return
    if made.code == 1 and trial.is_torchrun:  # any other command's own exit code is its answer
        made.code = first_code(trial.log) or 1
    if made.timed_out:
        made.failure = LogFailure(kind="hang")
    elif made.code:
        made.failure = find_failure(trial.log, trial.folder / "run", made.code, trial.package, trial.own)
        made.may_pass = bool(_MAY_PASS.search(made.failure.text)) and made.code != CANNOT_RUN_HERE
    made.verdict, made.reason = _verdict(trial, made)


def _verdict(trial: Trial, made: Outcome) -> tuple[Verdict, str]:
    asked, text = trial.signature, made.failure.text
    if made.timed_out:
        return "other" if asked.match else "bad", f"it ran longer than {trial.limit:.0f} s"
    if made.code == CANNOT_RUN_HERE:
        return "skip", f"{CANNOT}{text or 'the script said so, with exit code 125'}"
    if made.code == 0:
        return "good", "it passed"
    if asked.match and (line := _matching_line(asked.match, made)):
        made.failure = replace(made.failure, text=line)
        return "bad", line
    if trial.no_gpu and (_LACKS_A_GPU.search(text) or made.failure.slug in _NEED_A_GPU):
        return "skip", f"{CANNOT}{describe(made)}"
    return "other" if asked.match or asked.hang else "bad", describe(made)


def describe(made: Outcome) -> str:
    """Return how a failed trial ended, for people."""
    text = made.failure.text
    if made.code < 0 and not text:
        return f"it was killed by {Signals(-made.code).name}"
    if not text or text.startswith("its last line"):
        return f"it ended with exit code {made.code}{f'; {text}' if text else ' and printed nothing'}"
    return text


def _matching_line(wanted: str, made: Outcome) -> str:
    """Return the line of a failed run's log that shows what is looked for; "" if none does."""
    if wanted in catalogue():
        return made.failure.text if made.failure.slug == wanted else ""
    return next((shorten(line.text) for line in lines_of(made.log) if re.search(wanted, line.whole)), "")


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
