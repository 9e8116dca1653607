"""The project's own Bisection over candidates whose runs are planned, so that nothing is installed or started."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from harness.tools.bisection import bisection
from harness.tools.bisection.bisect_report import Answer
from harness.tools.bisection.bisection import Bisection, Progress
from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.classify import LOG, Run
from harness.tools.bisection.installation import Environment, Provider
from harness.tools.bisection.question import Options, Question
from harness.tools.bisection.state import Attempt, Failure, State


class Silent(Progress):
    """Says nothing."""

    def say(self, text: str) -> None:
        """Nothing."""


@dataclass
class Anything(Provider):
    """Environments that are only named."""

    store: Path = Path("/nowhere")

    def make(self, candidate: Candidate) -> Environment:
        return Environment(python="python", freeze={"moving": candidate.name})


def passed() -> Attempt:
    return Attempt(code=0, timed_out=False, seconds=0.0, verdict="good", log="", reason="it passed")


def failed(text: str, place: str = "", code: int = 1, slug: str = "", source: str = "") -> Attempt:
    failure = Failure(text=text, place=place, slug=slug, source=source)
    return Attempt(code=code, timed_out=False, seconds=0.0, verdict="bad", log="", failure=failure, reason=text)


def new_state(count: int, **options: object) -> State:
    """A bisect over 1.0, 1.1 and so on, of which nothing is known."""
    good, bad = (f"1.{count - 1}", "1.0") if options.get("find_fix") else ("1.0", f"1.{count - 1}")
    asked = Options(good=good, bad=bad, package="moving", **options)  # type: ignore[arg-type]
    question = Question(options=asked, command=("true",), folder="/")
    return State(question=question, candidates=[Candidate(name=f"1.{minor}") for minor in range(count)])


def answer(state: State, outcome: Callable[[int], Attempt], monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Run a bisect in which candidate 1.N ends as outcome(N) says."""

    def run_once(run: Run) -> Attempt:
        return replace(outcome(int(run.candidate.partition(".")[2])), log=str(run.folder / LOG))

    return bisection_of(state, run_once, monkeypatch).run()


def bisection_of(state: State, run_once: Callable[[Run], Attempt], monkeypatch: pytest.MonkeyPatch) -> Bisection:
    """A bisection that starts no process and writes nothing."""
    monkeypatch.setattr(bisection, "run_once", run_once)
    monkeypatch.setattr(bisection, "import_failure", lambda run: "")
    monkeypatch.setattr(bisection, "imported_by", lambda run: "")
    monkeypatch.setattr(State, "save", lambda state, folder: None)
    return Bisection(state, Path("/nowhere"), Anything(), Silent(), 0, True)
