"""One run of the command, and what it shows: good, bad, skip, or another failure than the one that is looked for."""

import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, Signals
from statistics import median

from harness.runtime.errors import CANNOT_RUN_HERE
from harness.tools.bisection.causes import LogTrace, trace_at
from harness.tools.bisection.installation import Environment
from harness.tools.bisection.question import Options, Question, command_of, is_of_this_repository
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
ALIASES = {
    "logprob_diff": "log_prob_difference_mean",
    "log_prob_diff": "log_prob_difference_mean",
    "step_seconds": "seconds",
}
"""Names that users may know -> those of metrics.jsonl."""
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"


class StopRequested(Exception):
    """The script ended with an exit code of 128 or more, which stops a bisect, as in git; one sentence."""


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """The first failure that a log shows, with its line and the traceback around it."""

    text: str = ""
    slug: str = ""
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
    variables |= {"BISECT_METRICS": str(folder / "metrics.jsonl"), "BISECT_PACKAGE": package}
    variables |= {"BISECT_CANDIDATE": candidate} if candidate else {}
    made = Attempt(code=-SIGKILL, timed_out=False, seconds=0.0, verdict="skip", log=str(log))
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
        made.may_pass, made.reason = True, "it kills the process that watches it"
        return made
    made.timed_out, made.seconds = ended.timed_out, ended.seconds
    cause = RootCause()  # torchrun's own code is 1, whatever the first rank's was
    for _, line in raw_lines(str(log)) if ended.code == 1 else ():
        cause.read(line.decode(errors="replace"))
    made.code = code = cause.code if cause.code and cause.code > 0 else ended.code
    if code >= FIRST_STOPPING_CODE and not ended.timed_out:
        raise StopRequested(f"the script ended with exit code {code}, which asks to stop; its output is in {log}.")
    if code and not ended.timed_out:
        failure = find_failure(log, folder / "run", code)
        made.failure, made.slug = failure.text, failure.slug
        for path in (*environment.paths, str(Path(environment.python).parent.parent)):
            made.failure = made.failure.replace(f"{path}/", "")
        made.may_pass = bool(_MAY_PASS.search(made.failure)) and code != CANNOT_RUN_HERE
        if failure.line and failure.line.file == str(log):
            made.line = failure.line.number
        if failure.trace:
            made.place, made.imported = failure.trace.place(package), failure.trace.shows_import(package)
    made.verdict, made.reason = _classify(question, made, log, no_gpu, reference, limit)
    return made


def _classify(
    question: Question, made: Attempt, log: Path, no_gpu: bool, reference: float | None, limit: float
) -> tuple[Verdict, str]:
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
        if value is not None and is_bad(options, value, limit_of(options, question.ratio, reference)):
            return "bad", label
        if made.code == 0:
            return ("good", label) if value is not None else ("skip", f"it passed and gave no {options.metric}")
    if made.code == 0:
        return "good", "it passed"
    reason = made.failure or describe_code(made.code)
    if question.kind == "match" and (line := _matching_line(question.options.match, made, log)):
        made.failure = line
        return "bad", line
    lacks_a_gpu = _LACKS_A_GPU.search(made.failure) or made.slug in ("update-needs-nvidia-driver", "sgl-kernel-missing")
    if no_gpu and lacks_a_gpu:
        return "skip", f"cannot run here: {reason}"
    return "bad" if question.kind == "failure" else "other", reason


def read_values(name: str, log: Path, folder: Path) -> list[float]:
    """Return all values of a run, in order: of any metrics.jsonl in its folder, else those that its log shows.

    The log shows NAME = 0.1, NAME: 0.1, or JSON.
    """
    names = {name, ALIASES.get(name, name)}
    written = [value for file in sorted(folder.rglob("metrics.jsonl")) for value in _of_file(file, names)]
    if written:
        return written
    either = "|".join(re.escape(each) for each in sorted(names))
    pattern = re.compile(rf"(?<![\w/.-])(?:{either})[\"']?\s*[=: ]\s*({_NUMBER})(?![\w.])", re.IGNORECASE)
    with log.open(errors="replace") as lines:
        return [float(match[1]) for line in lines for match in pattern.finditer(line)]


def _of_file(file: Path, names: set[str]) -> Iterator[float]:
    for line in file.read_text(errors="replace").splitlines():
        with suppress(json.JSONDecodeError, AttributeError):  # the last line of a killed run; a line that is no table
            values = json.loads(line)
            yield from (float(values[name]) for name in names if isinstance(values.get(name), int | float))


def compared_value(options: Options, values: list[float]) -> float | None:
    """Return the largest for --above, the smallest for --below, the median for --worse; None without any."""
    if not values:
        return None
    if any(map(math.isnan, values)):
        return math.nan
    return max(values) if options.above is not None else min(values) if options.below is not None else median(values)


def limit_of(options: Options, ratio: float | None, reference: float | None) -> float | None:
    """Return what the value is compared with. reference: the good end's value, for --worse; without it there is no limit."""
    if ratio is not None:
        return None if reference is None else ratio * reference
    return options.below if options.above is None else options.above


def is_bad(options: Options, value: float, limit: float | None) -> bool:
    return limit is not None and not (value >= limit if options.below is not None else value <= limit)


def _matching_line(wanted: str, made: Attempt, log: Path) -> str:
    """Return the line of a failed run's log that shows what --match asks for; "" if none does."""
    if wanted in catalogue():
        return made.failure if made.slug == wanted else ""
    lines = (parse_line(str(log), 0, number, raw) for number, raw in raw_lines(str(log)))
    return next((_shorten(line.text) for line in lines if re.search(wanted, line.whole)), "")


def find_failure(log: Path, run: Path, code: int) -> FirstFailure:
    """Find it by the catalogue, else by the first line that looks like a failure, else the last line without a signal."""
    try:
        found = diagnose(log_files([str(log), *([str(run)] if run.is_dir() else [])]))
    except (OSError, ValueError):
        found = diagnose([str(log)])
    line = found.finding.line if found.finding else found.suspicious
    if line is None:
        texts = (parse_line(str(log), 0, number, raw).text.strip() for number, raw in raw_lines(str(log)))
        last = deque(filter(None, texts), maxlen=1)
        return FirstFailure(_shorten(last[0]) if last and code > 0 else "")
    trace = trace_at(line.file, line.number)
    text = trace.exception if trace and trace.begins <= line.number < trace.ends and trace.exception else line.text
    return FirstFailure(_shorten(text), found.finding.entry.slug if found.finding else "", line, trace)


def describe_code(code: int) -> str:
    return f"it was killed by {Signals(-code).name}" if code < 0 else f"it ended with exit code {code} and no message"


def _shorten(text: str) -> str:
    return " ".join(text.split())[:_LONGEST]
