"""Find the largest engine.args.mem_fraction_static with which a run passes, resumed at once and in stages, by real runs."""

import bisect
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from harness.tools.process_tree import SupervisorKilled, run_tree

MODES = ("all", "staged")
"""Values of memory.resume."""
GRACE_SECONDS = 10.0  # how long processes that were asked to end may take


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run."""

    fraction: float
    resume: str
    passed: bool
    seconds: float
    reason: str
    """Empty if it passed, else the first line of the run that shows why not."""


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


def largest_passing(passes: Callable[[float], bool], low: float, high: float, resolution: float) -> float | None:
    """Return the largest candidate that passes, if all below it do, in at most 2 + log2(candidates) trials.

    None if low does not pass. If passing is not monotone, what is returned has passed, and its upper neighbour has not (or
    there is none). Each fraction is tried at most once.
    """
    fractions = candidates(low, high, resolution)
    if not passes(fractions[0]):
        return None
    if len(fractions) == 1 or passes(fractions[-1]):
        return fractions[-1]
    failing = bisect.bisect_left(fractions, True, 1, len(fractions) - 1, key=lambda fraction: not passes(fraction))
    return fractions[failing - 1]


@dataclass(kw_only=True, slots=True)
class MemorySearch:
    """Trials of one config, both ways of resuming. Whatever ends the search, no process that it started is left."""

    command: Sequence[str]
    """Runs the config once; --engine.args.mem_fraction_static, --memory.resume and --run.dir are appended."""
    timeout_seconds: float
    folder: Path
    """Receives one log and one run directory a trial."""
    begins: Callable[[str, float], None] = lambda resume, fraction: None
    ends: Callable[[Trial], None] = lambda _: None
    trials: list[Trial] = field(default_factory=list)

    def find(self, low: float, high: float, resolution: float, modes: Sequence[str] = MODES) -> dict[str, float | None]:
        """Return the largest fraction that passes, by way of resuming; None if the least does not pass."""

        def largest(resume: str) -> float | None:
            return largest_passing(lambda fraction: self.try_one(fraction, resume).passed, low, high, resolution)

        return {resume: largest(resume) for resume in modes}

    def try_one(self, fraction: float, resume: str) -> Trial:
        """Run once, to the end or to the timeout."""
        name = f"{resume}-{fraction:g}"
        overrides = ["--engine.args.mem_fraction_static", f"{fraction:g}", "--memory.resume", resume]
        command = [*self.command, *overrides, "--run.dir", str(self.folder / name)]
        log, started = self.folder / f"{name}.log", time.monotonic()
        environment = {"OMP_NUM_THREADS": "1"} | os.environ  # torchrun's own default, without its warning
        self.begins(resume, fraction)
        try:
            with log.open("wb") as output:
                ended = run_tree(
                    command, output=output, env=environment, timeout=self.timeout_seconds, grace=GRACE_SECONDS
                )
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
        self.ends(trial)
        return trial


def first_error(log: str) -> str:
    """Return the line that shows why a run failed: the first about memory, else the first verdict or exception, or ""."""
    lines = [line.strip() for line in log.splitlines()]
    memory, verdicts = ("out of memory", "Not enough memory", "Try to increase"), ("FAILED:", "error:")
    for marks in (memory, verdicts, ("Error", "Exception")):
        for line in lines:
            if any(mark in line for mark in marks):
                return line[:200]
    return ""


def as_json(found: dict[str, float | None], trials: Sequence[Trial]) -> str:
    """Return the largest fraction by way of resuming, and each run."""
    return json.dumps({"largest": found, "runs": [asdict(trial) for trial in trials]}, indent=1)


def torchrun_command(nproc_per_node: int, script: Path, words: Sequence[str]) -> list[str]:
    """Return the command of one run of the main job on this host, with this Python."""
    options = ["--standalone", f"--nproc-per-node={nproc_per_node}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, str(script), *words]
