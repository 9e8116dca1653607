"""One run of the command, and what it shows: good, bad, skip, or another failure than the one that is looked for."""

import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, Signals

from harness.runtime.errors import CANNOT_RUN_HERE
from harness.tools.bisection.causes import LogTrace, trace_at
from harness.tools.bisection.installation import Environment
from harness.tools.bisection.measurement import compared_value, is_bad, read_values
from harness.tools.bisection.question import Question, command_of, is_of_this_repository
from harness.tools.bisection.search import Verdict
from harness.tools.bisection.state import FOLDER_MODE, Attempt
from harness.tools.diagnose.diagnose import diagnose
from harness.tools.diagnose.entries import catalogue
from harness.tools.diagnose.log_lines import LogLine, log_files, parse_line, raw_lines
from harness.tools.hosts.host_output import RootCause
from harness.tools.process_tree import SupervisorKilled, run_tree

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
"""What a busy machine does to any release."""
_LONGEST = 240


class StopRequested(Exception):
    """The script ended with an exit code of 128 or more, which stops a bisect, as in git; one sentence."""


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """The first failure that a log shows, with its line and the traceback around it."""

    slug: str = ""
    text: str = ""
    line: LogLine | None = None
    trace: LogTrace | None = None


def run_once(
    question: Question,
    environment: Environment,
    folder: Path,
    *,
    no_gpu: bool,
    lock: int,
    candidate: str = "",
    reference: float | None = None,
    limit: float = 0.0,
    beat: Callable[[], None] | None = None,
) -> Attempt:
    """Run the command, with everything it leaves in `folder`.

    lock: descriptor of the bisect's lock, which all that it starts inherits; reference: the good end's number; limit:
    seconds, 0 for none; beat: called twice a second. Raises StopRequested, OSError.
    """
    package, log = question.options.package, folder / LOG
    folder.mkdir(FOLDER_MODE, parents=True)
    variables = environment.variables(no_gpu, is_of_this_repository(question))
    variables["BISECT_METRICS"] = str(folder / "metrics.jsonl")
    if candidate:
        variables |= {"BISECT_PACKAGE": package, "BISECT_CANDIDATE": candidate}
    started = time.monotonic()
    try:
        with log.open("wb") as output:
            ended = run_tree(
                command_of(question, environment.python, folder),
                output=output,
                env=variables,
                cwd=question.folder,
                timeout=limit,
                inherit=(lock,),
                tick=beat,
            )
    except SupervisorKilled:
        seconds, reason = time.monotonic() - started, "it kills the process that watches it"
        return Attempt(
            code=-SIGKILL, timed_out=False, seconds=seconds, verdict="skip", log=str(log), reason=reason, unwatched=True
        )
    code = _first_rank_code(log) if ended.code == 1 else ended.code
    if code >= FIRST_STOPPING_CODE and not ended.timed_out:
        raise StopRequested(
            f"the script ended with exit code {code}, which asks to stop (128 or more); its output is in {log}."
        )
    failure = find_failure(log, folder / "run", code) if code and not ended.timed_out else FirstFailure()
    text = failure.text
    for path in (*environment.paths, str(Path(environment.python).parent.parent)):
        text = text.replace(f"{path}/", "")
    made = Attempt(
        code=code,
        timed_out=ended.timed_out,
        seconds=ended.seconds,
        verdict="good",
        log=str(log),
        failure=text,
        slug=failure.slug,
        place=failure.trace.place(package) if failure.trace else "",
        line=failure.line.number if failure.line and failure.line.file == str(log) else 0,
        imported=failure.trace is not None and failure.trace.shows_import(package),
    )
    made.verdict, made.reason = _classify(question, made, log, no_gpu, reference, limit)
    return made


def _classify(
    question: Question, made: Attempt, log: Path, no_gpu: bool, reference: float | None, limit: float
) -> tuple[Verdict, str]:
    """Return the verdict, and why; set the attempt's value for --metric."""
    if made.timed_out:
        return "bad" if question.kind in ("failure", "hang") else "other", f"it ran past {limit:.0f} s"
    if made.code == CANNOT_RUN_HERE:
        return "skip", f"cannot run here: {made.failure or 'the script said so, with exit code 125'}"
    if question.kind == "metric":
        options = question.options
        made.value = value = compared_value(options, read_values(options.metric, log, log.parent))
        label = f"{options.metric} = {value:.6g}" if value is not None else ""
        if value is not None and question.ratio is not None and reference:
            label += f", {value / reference:.3f} times the good end's"
        if value is not None and is_bad(options, value, question.ratio, reference):
            return "bad", label
        if made.code == 0:
            return ("good", label) if value is not None else ("skip", f"it passed and gave no {options.metric}")
    if made.code == 0:
        return "good", "it passed"
    reason = made.failure or describe_code(made.code)
    if question.kind == "match" and (line := _matching_line(question.options.match, made.slug, log)):
        made.failure = line
        return "bad", line
    lacks_a_gpu = _LACKS_A_GPU.search(made.failure) or made.slug in ("update-needs-nvidia-driver", "sgl-kernel-missing")
    if no_gpu and lacks_a_gpu:
        return "skip", f"cannot run here: {reason}"
    return "bad" if question.kind == "failure" else "other", reason


def _matching_line(wanted: str, slug: str, log: Path) -> str:
    """Return the line of a failed run's log that shows what --match asks for; "" if none does."""
    if wanted in catalogue():
        if slug != wanted:
            return ""
        found = diagnose([str(log)]).finding
        return _shorten(found.line.text) if found else wanted
    pattern = re.compile(wanted)
    lines = (parse_line(str(log), 0, number, raw) for number, raw in raw_lines(str(log)))
    return next((_shorten(line.text) for line in lines if pattern.search(line.whole)), "")


def may_pass(made: Attempt) -> bool:
    """Return whether the failure may be the machine's at that moment: the candidate is run again before it counts."""
    return made.verdict in ("bad", "other") and not made.timed_out and bool(_MAY_PASS.search(made.failure))


def find_failure(log: Path, run: Path, code: int) -> FirstFailure:
    """Find it by the catalogue, else by the first line that looks like a failure, else the last line without a signal."""
    try:
        found = diagnose(log_files([str(log), *([str(run)] if run.is_dir() else [])]))
    except (OSError, ValueError):
        found = diagnose([str(log)])
    line = found.finding.line if found.finding else found.suspicious
    if line is None:
        texts = (parse_line(str(log), 0, number, raw).text.strip() for number, raw in raw_lines(str(log)))
        last = deque((text for text in texts if text), maxlen=1)
        return FirstFailure(text=_shorten(last[0]) if last and code > 0 else "")
    trace = trace_at(line)
    text = trace.exception if trace and trace.begins <= line.number < trace.ends and trace.exception else line.text
    return FirstFailure(found.finding.entry.slug if found.finding else "", _shorten(text), line, trace)


def describe_code(code: int) -> str:
    if code < 0:
        return f"it was killed by {Signals(-code).name}"
    return f"it ended with exit code {code} and no message"


def _first_rank_code(log: Path) -> int:
    """Return the code of the first rank to fail, which torchrun's report names; its own is 1, whatever the rank's was."""
    cause = RootCause()
    with log.open(errors="replace") as lines:
        for line in lines:
            cause.read(line)
    return 1 if cause.code is None or cause.code < 0 else cause.code


def _shorten(text: str) -> str:
    return " ".join(text.split())[:_LONGEST]
