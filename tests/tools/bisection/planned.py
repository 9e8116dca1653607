"""The project's own Bisection over candidates whose runs are planned, so that nothing is installed or started."""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.tools.bisection import bisection
from harness.tools.bisection.bisect_report import Answer, write_report
from harness.tools.bisection.bisection import Bisection, Progress
from harness.tools.bisection.candidates import Commits, Provider, find_candidates, settle
from harness.tools.bisection.question import Options, Question
from harness.tools.bisection.state import State
from harness.tools.diagnose.tracebacks import exception_name
from harness.tools.trial.environment import Environment
from harness.tools.trial.failure import LogFailure
from harness.tools.trial.indexes import Candidate
from harness.tools.trial.trial import Outcome, Trial
from tests.tools.bisection.bisecting import bare_python


class Silent(Progress):
    """Says nothing."""

    def say(self, text: str) -> None:
        """Nothing."""


class Anything:
    """Environments that are only named."""

    def make(self, candidate: Candidate) -> Environment:
        return Environment(python="python", freeze={"moving": candidate.name})


def passed() -> Outcome:
    return Outcome(code=0, timed_out=False, seconds=0.0, verdict="good", log="", reason="it passed")


def failed(text: str, place: str = "", code: int = 1, slug: str = "", source: str = "") -> Outcome:
    kind = exception_name(text) or f"exit code {code}"
    failure = LogFailure(kind=kind, text=text, place=place, slug=slug, source=source)
    return Outcome(code=code, timed_out=False, seconds=0.0, verdict="bad", log="", failure=failure, reason=text)


def new_state(count: int, **options: object) -> State:
    """A bisect over 1.0, 1.1 and so on, of which nothing is known."""
    good, bad = (f"1.{count - 1}", "1.0") if options.get("find_fix") else ("1.0", f"1.{count - 1}")
    asked = Options(good=good, bad=bad, package="moving", **options)  # type: ignore[arg-type]
    question = Question(options=asked, command=("true",), folder="/")
    return State(question=question, candidates=[Candidate(name=f"1.{minor}") for minor in range(count)])


def answer(state: State, outcome: Callable[[int], Outcome], monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Run a bisect in which candidate 1.N ends as outcome(N) says."""

    def run(trial: Trial) -> Outcome:
        return outcome(int(candidate_of(trial).partition(".")[2]))

    return bisection_of(state, run, monkeypatch).run()


def candidate_of(trial: Trial) -> str:
    return trial.variables["BISECT_CANDIDATE"]


def bisection_of(
    state: State, run: Callable[[Trial], Outcome], monkeypatch: pytest.MonkeyPatch, provider: Provider | None = None
) -> Bisection:
    """A bisection that starts no trial and keeps no state."""
    monkeypatch.setattr(bisection, "run_trial", lambda trial, _: run(trial))
    monkeypatch.setattr(bisection, "import_failure", lambda *_: "")
    monkeypatch.setattr(bisection, "imported_by", lambda *_: "")
    monkeypatch.setattr(State, "save", lambda state, folder: None)
    return Bisection(state, Path("/nowhere"), provider or Anything(), Silent(), 0, True)


def question_of(checkout: Path, good: str, bad: str, **options: object) -> Question:
    """Ask for the commits of a checkout, with hashes for its ends."""
    asked = Options(git=str(checkout), good=good, bad=bad, **options)  # type: ignore[arg-type]
    return settle(Question(options=asked, command=("true",), folder="/"))


def provider_of(question: Question, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Commits:
    """The commits of a question, unpacked below the folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    options = question.options
    return Commits(checkout=Path(options.git), package=options.package, python=bare_python())


def ran(trial: Trial, code: str) -> Outcome:
    """Run Python code with the trial's package; a module that is not there means that it cannot run."""
    environment = {"PYTHONPATH": trial.own[0], "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([bare_python(), "-c", code], env=environment, capture_output=True, text=True)
    if not done.returncode:
        return passed()
    found = failed(done.stderr.strip().rpartition("\n")[2], code=done.returncode)
    return replace(found, verdict="skip") if found.reason.startswith("ModuleNotFoundError") else found


def bisect_commits(
    question: Question, folder: Path, run: Callable[[Trial], Outcome], monkeypatch: pytest.MonkeyPatch
) -> tuple[State, Answer, str, str]:
    """Bisect real commits in this process. Return the state, the answer, its sentences and the report."""
    state = State(question=question, candidates=find_candidates(question), python=bare_python())
    found = bisection_of(state, run, monkeypatch, provider_of(question, folder, monkeypatch)).run()
    said = write_report(state, found, folder)
    return state, found, said, (folder / "report.md").read_text()
