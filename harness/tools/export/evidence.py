"""What an issue needs besides the program: sglang.check_env, the bisect's answer, the name of the failure."""

import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import join

from harness.tools.bisection.bisect_report import answer_of, sentences
from harness.tools.bisection.bisection import COMMITS_FOLDER
from harness.tools.bisection.question import SCRIPT
from harness.tools.bisection.state import STATE, load_state
from harness.tools.diagnose.diagnose import diagnose
from harness.tools.diagnose.log_lines import log_files
from harness.tools.environment_file import package_versions
from harness.tools.export.program import Evidence
from harness.tools.export.subject import Subject

CHECK_SECONDS = 120.0
REPORT = "report.md"
"""Of a finished bisect."""
COMPARED = ("python", "torch", "sglang", "transformers")


def gather(subject: Subject, bisect: str) -> Evidence:
    """Return the evidence. bisect: its folder, or "" for the one in which the run was made, if any.

    Raises ValueError.
    """
    failed = subject.seen is not None and bool(subject.seen.code)
    finding = diagnose(log_files([subject.words[0]])).finding if failed else None
    said = [line.whole for signature, line in finding.evidence[:1] if not signature.near] if finding else []
    folder = Path(bisect) if bisect else finished_bisect_of(Path(subject.words[0]).absolute())
    answer = bisect_answer(folder) if folder else ()  # before check_env, which takes seconds
    slug = finding.entry.slug if finding else ""
    return Evidence(slug=slug, said="".join(said), check_env=check_env(subject), bisect=answer)


def finished_bisect_of(run: Path) -> Path | None:
    """Return the folder of the bisect that made a run in BISECT/runs/CANDIDATE/NUMBER/run, if it has an answer."""
    if len(run.parents) < 5 or (run.name, run.parents[2].name) != ("run", "runs"):
        return None
    folder = run.parents[3]
    return folder if (folder / STATE).is_file() and (folder / REPORT).is_file() else None


def check_env(subject: Subject) -> list[str]:
    """Return what `python -m sglang.check_env` prints here, and a line if the run had other versions or another
    host.
    """
    command = [sys.executable, "-P", "-m", "sglang.check_env"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        return [f"it did not end within {CHECK_SECONDS:.0f} s"]
    if done.returncode:
        return [f"it failed: {done.stderr.strip().rpartition(chr(10))[2]}"]
    lines = [line.rstrip() for line in done.stdout.strip().splitlines()]
    here, there = package_versions(), subject.ranks[0].versions if subject.ranks else {}
    others = [f"{name} {there[name]}" for name in COMPARED if name in there and there[name] != here.get(name)]
    hosts = {each.host for each in subject.ranks} - {platform.node()}
    if others or hosts:
        where = f" on {', '.join(sorted(hosts))}" if hosts else ""
        lines.append(
            f"(printed on {platform.node()}; the run was{where}{' with ' if others else ''}{', '.join(others)})"
        )
    return lines


def bisect_answer(folder: Path) -> Sequence[str]:
    """Return the command and the answer of a finished bisect, and of the one over commits that followed it.

    Raises ValueError.
    """
    state = load_state(folder)
    if not (folder / REPORT).is_file():
        raise ValueError(f"the bisect in {folder} has no answer yet; finish it with {SCRIPT} --resume {folder}.")
    lines = [join(["python3", SCRIPT, *state.question.words()]), *sentences(state, answer_of(state))]
    inner = folder / COMMITS_FOLDER
    return [*lines, *(bisect_answer(inner) if (inner / REPORT).is_file() else ())]
