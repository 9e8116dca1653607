"""One run of the command, and what it says: good, bad, skip, or another failure than the one that is looked for."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, Signals

from harness.runtime.errors import CANNOT_RUN_HERE
from harness.tools.bisection import measure, supervised
from harness.tools.bisection.command import command_of
from harness.tools.bisection.environment import Environment
from harness.tools.bisection.question import Question
from harness.tools.bisection.search import Verdict
from harness.tools.bisection.state import FOLDER_MODE, Attempt
from harness.tools.bisection.trace import Trace, trace_at
from harness.tools.diagnose.diagnose import diagnose
from harness.tools.diagnose.entries import catalogue
from harness.tools.diagnose.log_lines import LogLine, log_files, parse_line, raw_lines
from harness.tools.hosts.console import RootCause

FIRST_STOPPING_CODE = 128
LOG = "log.txt"
_LACKS_A_GPU = re.compile(
    r"found no nvidia driver|not compiled with cuda|no cuda gpus are available|libcuda(rt|)\.so|libcudnn|libnvrtc|libnccl"
    r"|sgl_kernel.*import-only stand-in|cannot import name .* from '(sgl_kernel|torchvision)|cuda driver (version|initialization)"
    r"|no module named '(sgl_kernel|flashinfer|vllm|torch_memory_saver|deep_gemm|flash_attn|torchaudio|torchcodec)\b"
    r"|sgl-?kernel is required|only (works|supported) on cuda|operator torchvision::",
    re.IGNORECASE,
)
_PASSING = re.compile(
    r"EADDRINUSE|address already in use|no space left on device|cannot allocate memory|temporary failure in name resolution"
    r"|too many open files|connection reset by peer|read timed out",
    re.IGNORECASE,
)
"""What a machine does to any release, when something else runs on it."""
_LONGEST = 240


class Stop(Exception):
    """The script asks that the bisect stops, as git bisect has it: an exit code of 128 or more; one sentence."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure that a log shows."""

    slug: str
    text: str
    line: LogLine | None = None
    """Where it stands."""
    trace: Trace | None = None
    """The traceback that it is of."""


def attempt(
    question: Question,
    environment: Environment,
    folder: Path,
    *,
    no_gpu: bool,
    variables: Mapping[str, str],
    lock: int,
    reference: float | None,
    limit: float,
    beat: Callable[[], None],
) -> Attempt:
    """Run it once, with everything it leaves in `folder`. reference: the good end's number; limit: seconds, 0 for none. Raises
    Stop, OSError."""
    folder.mkdir(FOLDER_MODE, parents=True)
    log = folder / LOG
    started = time.monotonic()
    try:
        ended = supervised.run(
            command_of(question, environment.python, folder),
            log,
            environment={**environment.variables(no_gpu), **variables, "BISECT_METRICS": str(folder / "metrics.jsonl")},
            folder=question.folder,
            limit=limit,
            inherit=(lock,),
            beat=beat,
        )
    except supervised.WatcherKilled:
        return _unwatched(log, time.monotonic() - started)
    code = _code(ended.code, log)
    if code >= FIRST_STOPPING_CODE and not ended.timed_out:
        raise Stop(f"the script ended with exit code {code}, which asks to stop (128 or more); its output is in {log}.")
    failure = first_failure(log, folder / "run", code) if code and not ended.timed_out else Failure("", "")
    shown = failure.text
    for path in (*environment.paths, str(Path(environment.python).parent.parent)):
        shown = shown.replace(f"{path}/", "")
    made = Attempt(
        code=code,
        timed_out=ended.timed_out,
        seconds=ended.seconds,
        verdict="good",
        log=str(log),
        failure=shown,
        slug=failure.slug,
        place=failure.trace.place(question.options.package) if failure.trace else "",
        line=failure.line.number if failure.line and failure.line.file == str(log) else 0,
        imported=failure.trace is not None and failure.trace.shows_import(question.options.package),
    )
    made.verdict, made.reason = verdict(question, made, log, no_gpu=no_gpu, reference=reference, limit=limit)
    return made


def _unwatched(log: Path, seconds: float) -> Attempt:
    reason = "it kills the process that watches it"
    return Attempt(
        code=-SIGKILL, timed_out=False, seconds=seconds, verdict="skip", log=str(log), reason=reason, unwatched=True
    )


def verdict(
    question: Question, made: Attempt, log: Path, *, no_gpu: bool, reference: float | None, limit: float
) -> tuple[Verdict, str]:
    """What an attempt says, and why; sets its value for --metric."""
    if made.timed_out:
        counts = question.kind in ("failure", "hang")
        return "bad" if counts else "other", f"it ran past {limit:.0f} s"
    if made.code == CANNOT_RUN_HERE:
        return "skip", f"cannot run here: {made.failure or 'the script said so, with exit code 125'}"
    if question.kind == "metric":
        number = measure.value(question.options, measure.values(question.options.metric, log, log.parent))
        made.value = number
        shown = f"{question.options.metric} = {number:.6g}" if number is not None else ""
        if number is not None and question.ratio is not None and reference:
            shown += f", {number / reference:.3f} times the good end's"
        if number is not None and measure.is_bad(question.options, number, question.ratio, reference):
            return "bad", shown
        if made.code == 0:
            if number is None:
                return "skip", f"it passed and told no {question.options.metric}"
            return "good", shown
    if made.code == 0:
        return "good", "it passed"
    ended = made.failure or how_it_ended(made.code)
    if question.kind == "match":
        shown = matched(question.options.match, made.slug, log)
        if shown:
            made.failure = shown
            return "bad", shown
    if no_gpu and lacks_a_gpu(made, log):
        return "skip", f"cannot run here: {ended}"
    return ("bad" if question.kind == "failure" else "other"), ended


def matched(wanted: str, slug: str, log: Path) -> str:
    """The line of a failing run's log that shows what --match asks for; "" if none does."""
    if wanted in catalogue():
        if slug == wanted:
            found = diagnose([str(log)]).finding
            return _shown(found.line.text) if found else wanted
        return ""
    pattern = re.compile(wanted)
    for number, raw in raw_lines(str(log)):
        line = parse_line(str(log), 0, number, raw)
        if pattern.search(line.whole):
            return _shown(line.text)
    return ""


def lacks_a_gpu(made: Attempt, log: Path) -> bool:
    """Whether the failure is this machine's, not the release's: it wants a GPU or its libraries."""
    return bool(_LACKS_A_GPU.search(made.failure)) or made.slug in ("update-needs-nvidia-driver", "sgl-kernel-missing")


def may_pass(made: Attempt) -> bool:
    """Whether it failed for want of something that may be there a moment later: it is run again before it counts."""
    return made.verdict in ("bad", "other") and not made.timed_out and bool(_PASSING.search(made.failure))


def first_failure(log: Path, run: Path, code: int) -> Failure:
    """By the catalogue, else the first line that looks like a failure, else the last line, unless a signal ended it."""
    sources = [str(log), *([str(run)] if run.is_dir() else [])]
    try:
        found = diagnose(log_files(sources))
    except (OSError, ValueError):
        found = diagnose([str(log)])
    line = found.finding.line if found.finding else found.suspicious
    if line is None:
        return Failure("", _last_line(log) if code > 0 else "")
    trace = trace_at(line)
    text = trace.exception if trace and trace.begins <= line.number < trace.ends and trace.exception else line.text
    return Failure(found.finding.entry.slug if found.finding else "", _shown(text), line, trace)


def how_it_ended(code: int) -> str:
    """Of a script that says nothing."""
    if code < 0:
        return f"it was killed by {Signals(-code).name}"
    return f"it ended with exit code {code}, without a word"


def _code(code: int, log: Path) -> int:
    """torchrun answers 1 whatever its ranks answered; its last words say what the first one to fail did."""
    if code != 1:
        return code
    cause = RootCause()
    with log.open(errors="replace") as lines:
        for line in lines:
            cause.read(line)
    return 1 if cause.code is None or cause.code < 0 else cause.code


def _last_line(log: Path) -> str:
    last = ""
    for number, raw in raw_lines(str(log)):
        text = parse_line(str(log), 0, number, raw).text.strip()
        last = text or last
    return _shown(last)


def _shown(text: str) -> str:
    return " ".join(text.split())[:_LONGEST]
