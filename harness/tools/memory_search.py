"""Find the largest engine.args.mem_fraction_static with which a run passes, resumed at once and in stages, by real runs."""

import bisect
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from harness.tools.process_tree import SupervisorKilled, run_tree


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run; reason is empty if it passed, else the first line of the run that shows why not."""

    fraction: float
    resume: str
    passed: bool
    seconds: float
    reason: str

    def __str__(self) -> str:
        verdict = "passed" if self.passed else f"failed: {self.reason}"
        return f"{self.resume:<8} {self.fraction:.3f}  {self.seconds:6.1f} s  {verdict}"


def candidates(low: float, high: float, resolution: float) -> list[float]:
    """Return the fractions that a search may try: low, and steps of resolution up to high; each rounded to 4 digits.

    Raise ValueError unless 0 < low <= high < 1 and resolution is at least 0.001.
    """
    if not 0 < low <= high < 1:
        raise ValueError(f"--low and --high must be 0 < low <= high < 1, got --low {low:g} --high {high:g}.")
    if resolution < 0.001:
        raise ValueError(f"--resolution must be at least 0.001, got {resolution:g}.")
    steps = math.floor((high - low) / resolution + 1e-9)
    return [round(low + step * resolution, 4) for step in range(steps + 1)]


def largest_passing(passes: Callable[[float], bool], fractions: Sequence[float]) -> float | None:
    """Return the largest fraction that passes, if all below it do, in at most 2 + log2(len(fractions)) trials.

    None if the first does not pass. If passing is not monotone, what is returned has passed, and its upper neighbour has not
    (or there is none). Each fraction is tried at most once.
    """
    if not passes(fractions[0]):
        return None
    if len(fractions) == 1 or passes(fractions[-1]):
        return fractions[-1]
    failing = bisect.bisect_left(fractions, True, 1, len(fractions) - 1, key=lambda fraction: not passes(fraction))
    return fractions[failing - 1]


@dataclass(kw_only=True, slots=True)
class MemorySearch:
    """Trials of one config. Whatever ends the search, no process that it started is left.

    command: runs the config once; --engine.args.mem_fraction_static, --memory.resume and --run.dir are appended. folder:
    receives one log and one run directory a trial. say: is given a line when a trial begins, and one when it ends.
    """

    command: Sequence[str]
    timeout_seconds: float
    folder: Path
    say: Callable[[str], None] = print
    trials: list[Trial] = field(default_factory=list)

    def find(self, fractions: Sequence[float], modes: Sequence[str]) -> dict[str, float | None]:
        """Return the largest fraction that passes, by value of memory.resume; None if the least does not pass."""
        return {mode: largest_passing(partial(self.passes, mode), fractions) for mode in modes}

    def passes(self, resume: str, fraction: float) -> bool:
        """Run once, to the end or to the timeout."""
        name = f"{resume}-{fraction:g}"
        overrides = ["--engine.args.mem_fraction_static", f"{fraction:g}", "--memory.resume", resume]
        command = [*self.command, *overrides, "--run.dir", str(self.folder / name)]
        log, started = self.folder / f"{name}.log", time.monotonic()
        environment = {"OMP_NUM_THREADS": "1"} | os.environ  # torchrun's own default, without its warning
        self.say(f"{resume:<8} {fraction:.3f}  running")
        try:
            with log.open("wb") as output:
                ended = run_tree(command, output=output, env=environment, timeout=self.timeout_seconds)
        except SupervisorKilled as error:
            reason = str(error)
        else:
            logs = [log, *sorted((self.folder / name / "engines").glob("*.log"))]
            text = "\n".join(each.read_text(errors="replace") for each in logs)
            reason = "" if ended.code == 0 else first_error(text) or f"exit code {ended.code}"
            if ended.timed_out:
                reason = f"no end after {self.timeout_seconds:g} s"
        seconds = time.monotonic() - started
        trial = Trial(fraction=fraction, resume=resume, passed=not reason, seconds=seconds, reason=reason)
        self.trials.append(trial)
        self.say(str(trial))
        return trial.passed


def first_error(log: str) -> str:
    """Return the line that shows why a run failed: the first about memory, else the first verdict or exception, or ""."""
    memory, verdicts = ("out of memory", "Not enough memory", "Try to increase"), ("FAILED:", "error:")
    for marks in (memory, verdicts, ("Error", "Exception")):
        if found := [line for line in log.splitlines() if any(mark in line for mark in marks)]:
            return found[0].strip()[:200]
    return ""
