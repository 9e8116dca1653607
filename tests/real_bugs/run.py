"""Put real bugs back, one at a time, and see which of them the main job catches, and what it says.

    python3 -m tests.real_bugs.run [ID ...] [--jobs N] [--write] [--keep FOLDER] [-- OVERRIDES of every run]

Each run is launch/ppo.py on two ranks of the CPU. Prints a line for each bug; --write writes docs/measurements/real_bugs.md.
Exit codes: 0 as expected; 1 a bug was missed, did not act or got a wrong name, or a healthy control failed; 2 the
command line is wrong.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.real_bugs import engine, sender, trainer
from tests.real_bugs.bug import Bug

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "measurements" / "real_bugs.md"
TORCHRUN = ("launch/torchrun.py", "--nnodes=1", "--local-addr=127.0.0.1", "--nproc-per-node=2", "launch/ppo.py")
SECONDS = 300
FAILED = re.compile(r"^rank \d+ FAILED: (\w+): (.*)$", re.MULTILINE)
DIED = re.compile(r"^FIRST FAILURE: .*? UTC: ()(.*)$", re.MULTILINE)
WHEN = re.compile(r"^FIRST FAILURE: .* failed ((?:in|after) \w+(?: of step \d+)?)", re.MULTILINE)
RELEASE = re.compile(r"engine up: sglang (\S+)")
NAMED = re.compile(r"\b([Kk]nown as|[Ll]ooks like) `?([\w-]+)`?: ")
WRONG = ("missed", "did not act", "WRONG NAME", "FALSE ALARM", "hung", "did not start")
ORDER = (*WRONG, "not named", "caught", "outside", "passes")


def bugs() -> dict[str, Bug]:
    """Return all bugs by id, in the order of their files."""
    found = (each for module in (engine, sender, trainer) for each in vars(module).values())
    return {each.id: each for each in found if isinstance(each, Bug)}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run showed."""

    bug: Bug
    exit_code: int
    """124: it had to be ended."""
    seconds: float
    times_acted: int
    release: str = ""
    """Of SGLang."""
    exception: str = ""
    when: str = ""
    """The phase and the step of the failure."""
    sentence: str = ""
    names: tuple[str, ...] = ()
    """Entries of the catalogue that screen, report and launch/diagnose.py name: "known as SLUG"."""

    @property
    def verdict(self) -> str:
        """One of ORDER."""
        if self.exit_code not in (0, 1):
            return "hung" if self.exit_code == 124 else "did not start"
        if not self.times_acted:
            return "did not act"
        if self.exit_code == 0:
            claims_too_much = self.bug.unsaid and re.search(self.bug.unsaid, self.sentence)
            return "missed" if self.bug.expected == "caught" or claims_too_much else self.bug.expected
        if self.bug.expected == "passes":
            return "FALSE ALARM"
        right = {f"known as {slug}" for slug in self.bug.slugs}
        if any(name.startswith("known as ") and name not in right for name in self.names):
            return "WRONG NAME"
        said = "\n".join((self.sentence, *self.names))
        return "caught" if self.bug.says and re.search(self.bug.says, said) else "not named"

    def line(self) -> str:
        """Return the outcome as a line of the screen."""
        where = f"{self.exception} {self.when}".strip() or "-"
        facts = (self.bug.id, self.verdict, f"exit {self.exit_code}", where, ", ".join(self.names) or "no name")
        return " | ".join((*facts, f"{self.seconds:.0f} s, acted {self.times_acted}x", self.sentence[:150]))


def try_bug(bug: Bug, folder: Path, overrides: Sequence[str]) -> Outcome:
    """Run the main job with the bug planted, in FOLDER/ID."""
    run, screen, mark = folder / bug.id, folder / f"{bug.id}.log", folder / f"{bug.id}.acted"
    words = [sys.executable, *TORCHRUN, *bug.words(), *overrides, "--run.dir", str(run)]
    environment = os.environ | bug.environment(mark)
    began = time.monotonic()
    with screen.open("w") as log:
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            process.wait()
            code = 124
    times = mark.stat().st_size if mark.exists() else 0
    return read_outcome(bug, screen.read_text(errors="replace"), run, code, time.monotonic() - began, times)


def read_outcome(bug: Bug, screen: str, run: Path, code: int, seconds: float, times: int) -> Outcome:
    """Return what the screen, the run's report and launch/diagnose.py say."""
    diagnose = [sys.executable, "launch/diagnose.py", str(run)]
    diagnosed = subprocess.run(diagnose, cwd=ROOT, capture_output=True, text=True).stdout if code else ""
    report = run / "report.md"
    said = "\n".join((screen, report.read_text() if report.exists() else "", diagnosed))
    failed, when = FAILED.search(screen) or DIED.search(screen), WHEN.search(screen)
    exception, sentence = failed.groups() if failed else ("", (screen.splitlines() or [""])[-1])
    return Outcome(
        bug=bug,
        exit_code=code,
        seconds=seconds,
        times_acted=times,
        release=found[1] if (found := RELEASE.search(screen)) else "",
        exception=exception,
        when=when[1] if when else "",
        sentence=sentence.replace(str(run), "RUN"),
        names=tuple(sorted({" ".join(found).lower() for found in NAMED.findall(said)})) if code else (),
    )


def page(outcomes: Sequence[Outcome], overrides: Sequence[str]) -> str:
    """Return docs/measurements/real_bugs.md."""
    count = {verdict: sum(each.verdict == verdict for each in outcomes) for verdict in ORDER}
    counted = ", ".join(f"{number} {verdict}" for verdict, number in count.items() if number)
    rows = [
        "| id | mended by | bug | setting | verdict | where | what it says, and names | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in sorted(outcomes, key=lambda each: ORDER.index(each.verdict)):
        setting = " ".join(
            [*([Path(each.bug.config).stem] if "quickstart" not in each.bug.config else []), *each.bug.settings]
        )
        said = "; ".join(filter(None, (each.sentence[:150] if each.exit_code else "", ", ".join(each.names))))
        cells = (each.bug.id, each.bug.pull, each.bug.sentence, f"`{setting}`" if setting else "", each.verdict)
        cells = (*cells, f"{each.exception} {each.when}".strip(), said, f"{each.seconds:.0f}")
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    releases = ", ".join(sorted({each.release for each in outcomes if each.release}))
    return INTRODUCTION.format(
        releases=releases, words=" ".join(overrides) or "none", counted=counted, table="\n".join(rows)
    )


INTRODUCTION = """# Real bugs put back

Each row is a mistake that was once merged into SGLang, slime, miles, verl or another trainer, and mended by the pull
request that is named. `tests/real_bugs` writes it again, by hand, into SGLang {releases} or into this harness, in the place
where it would be today; it is the same mistake, not the same lines. Then the main job runs: three PPO steps of a tiny
model, two ranks of a CPU, tp 2. Most entries were chosen because a review had tried them, so the share that is caught
says nothing of bugs that nobody has thought of. Bugs of CUDA kernels, graphs and of a paused memory cannot act here.

    python3 -m tests.real_bugs.run --write

Overrides of every run: {words}. In all: {counted}.

- missed: the run passed, or claimed what was not done. outside: it passed, and no check of weights could see
  it. passes: a healthy engine, which must.
- caught: it failed, and its words have the tensor or the cause. not named: it failed before the first update, and its
  words say no more than that engine and trainer are further apart than rounding; `launch/mismatch.py`, which they name,
  then looks for the setting or the module.
- WRONG NAME: a known failure that it is not was named as known.

{table}
"""


def main(arguments: Sequence[str]) -> int:
    """Return the exit code."""
    known: Mapping[str, Bug] = bugs()
    own, overrides = list(arguments), []
    if "--" in own:
        own, overrides = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(prog="python3 -m tests.real_bugs.run", description=__doc__.splitlines()[0])
    parser.add_argument("ids", nargs="*", metavar="ID", help=f"none: all of {', '.join(known)}")
    parser.add_argument("--jobs", type=int, default=1, help="so many runs at a time")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--keep", type=Path, help="folder for the runs; otherwise they are deleted")
    options = parser.parse_args(own)
    if unknown := set(options.ids) - known.keys():
        parser.error(f"there is no bug {', '.join(sorted(unknown))}; --help names them")
    if options.write and options.ids:
        parser.error("--write is of all bugs; leave the ids out")
    if options.keep and any((options.keep / each).exists() for each in options.ids or known):
        parser.error(f"--keep {options.keep} must hold no run of these bugs; give another folder")
    with tempfile.TemporaryDirectory(prefix="real-bugs-") as temporary, ThreadPoolExecutor(options.jobs) as pool:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = []
        chosen = [known[each] for each in options.ids or known]
        for outcome in pool.map(partial(try_bug, folder=folder, overrides=overrides), chosen):
            print(outcome.line(), flush=True)
            outcomes.append(outcome)
    if options.write:
        PAGE.write_text(page(outcomes, overrides))
    return int(any(each.verdict in WRONG for each in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
