"""The largest engine.args.mem_fraction_static with which a run passes, woken at once and in stages, by real runs.

largest_passing is the search, and knows nothing of processes; each trial is one torchrun, whose whole tree is ended.
"""

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from harness.runtime.process_tree import SupervisorKilled, run_tree

MODES = ("all", "staged")
GRACE_SECONDS = 10.0  # how long processes that were asked to end may take


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One run."""

    fraction: float
    wake: str
    passed: bool
    seconds: float
    reason: str
    """Empty where it passed, else the first line of the run that says why not."""


def candidates(low: float, high: float, resolution: float) -> list[float]:
    """Return the fractions that a search may try: low, and steps of resolution up to high; each rounded to 4 digits.

    Raises ValueError unless 0 < low <= high < 1 and resolution is at least 0.001.
    """
    if not 0 < low <= high < 1:
        raise ValueError(f"--low {low:g} --high {high:g} is no range to search: 0 < low <= high < 1 is needed.")
    if resolution < 0.001:
        raise ValueError(f"--resolution {resolution:g} is too fine to mean anything: give at least 0.001.")
    steps = math.floor((high - low) / resolution + 1e-9)
    return [round(low + step * resolution, 4) for step in range(steps + 1)]


def largest_passing(passes: Callable[[float], bool], low: float, high: float, resolution: float) -> float | None:
    """Return the largest candidate that passes, if all below it do: bisection, at most 2 + log2(candidates) trials.

    None where low does not pass. Where passing is not monotone, what is returned has passed, and its upper neighbour has
    not (or there is none). Each fraction is tried at most once.
    """
    fractions = candidates(low, high, resolution)
    if not passes(fractions[0]):
        return None
    if len(fractions) == 1 or passes(fractions[-1]):
        return fractions[-1]
    good, bad = 0, len(fractions) - 1
    while bad - good > 1:
        middle = (good + bad) // 2
        if passes(fractions[middle]):
            good = middle
        else:
            bad = middle
    return fractions[good]


@dataclass(kw_only=True, slots=True)
class Search:
    """Trials of one config, both ways of waking. Whatever ends the search, nothing that it started lives on."""

    command: Sequence[str]
    """Runs the config once; --engine.args.mem_fraction_static, --memory.resume and --run.dir are appended."""
    timeout_seconds: float
    folder: Path
    """Receives one log and one run directory a trial."""
    begin: Callable[[str, float], None] = lambda wake, fraction: None
    """Called before each trial."""
    tell: Callable[[Outcome], None] = lambda _: None
    outcomes: list[Outcome] = field(default_factory=list)

    def find(self, low: float, high: float, resolution: float, modes: Sequence[str] = MODES) -> dict[str, float | None]:
        """Return the largest fraction that passes, by way of resuming; None where the least does not pass."""

        def largest(wake: str) -> float | None:
            return largest_passing(lambda fraction: self.try_one(fraction, wake).passed, low, high, resolution)

        return {wake: largest(wake) for wake in modes}

    def try_one(self, fraction: float, wake: str) -> Outcome:
        """One run to its end, or to the timeout."""
        name = f"{wake}-{fraction:g}"
        overrides = ["--engine.args.mem_fraction_static", f"{fraction:g}", "--memory.resume", wake]
        command = [*self.command, *overrides, "--run.dir", str(self.folder / name)]
        log = self.folder / f"{name}.log"
        started = time.monotonic()
        self.begin(wake, fraction)
        environment = {"OMP_NUM_THREADS": "1"} | os.environ  # torchrun's own default, without its warning
        try:
            with log.open("wb") as output:
                ended = run_tree(
                    command, output=output, env=environment, timeout=self.timeout_seconds, grace=GRACE_SECONDS
                )
        except SupervisorKilled as error:
            reason = str(error)
        else:
            logs = [log, *sorted((self.folder / name / "engines").glob("*.log"))]
            said = "\n".join(each.read_text(errors="replace") for each in logs)
            reason = "" if ended.code == 0 else first_error(said) or f"exit code {ended.code}"
            if ended.timed_out:
                reason = f"no end after {self.timeout_seconds:g} s"
        seconds = time.monotonic() - started
        outcome = Outcome(fraction=fraction, wake=wake, passed=not reason, seconds=seconds, reason=reason)
        self.outcomes.append(outcome)
        self.tell(outcome)
        return outcome


def first_error(log: str) -> str:
    """Return the line that says why a run failed, of its own output and then its engines': the first that tells of memory, else
    the first verdict, else the first exception; empty if there is none."""
    lines = [line.strip() for line in log.splitlines()]
    for marks in (
        ("out of memory", "Not enough memory", "Try to increase"),
        ("FAILED:", "error:"),
        ("Error", "Exception"),
    ):
        for line in lines:
            if any(mark in line for mark in marks):
                return line[:200]
    return ""


def as_json(found: dict[str, float | None], outcomes: Sequence[Outcome]) -> str:
    """All of a search: the largest fraction by way of resuming, and each run."""
    return json.dumps({"largest": found, "runs": [asdict(outcome) for outcome in outcomes]}, indent=1)


def trial_folder() -> Path:
    """Return a fresh folder for logs and run directories."""
    return Path(tempfile.mkdtemp(prefix="harness-memory-"))


def torchrun_command(nproc_per_node: int, script: Path, words: Sequence[str]) -> list[str]:
    """One run of the main job on this host, with this Python."""
    return [
        *[sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc_per_node}"],
        *[str(script), *words],
    ]
