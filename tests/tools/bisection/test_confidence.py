"""Failures that come and go, simulated: the project's own Bisection over runs that are drawn and not made."""

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.tools.bisection.answer import answer_of, sentences
from harness.tools.bisection.bisection import Bisection, Progress
from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.confidence import confidence, runs_spent
from harness.tools.bisection.installation import Environment, Provider
from harness.tools.bisection.question import Options, Question, WrongQuestion
from harness.tools.bisection.state import Attempt, State
from harness.tools.bisection.store import Store

CANDIDATES = 22


class Silent(Progress):
    """Says nothing."""

    def say(self, text: str) -> None:
        """Nothing."""


@dataclass
class Anything(Provider):
    """Environments that are only named."""

    store: Store = field(default_factory=lambda: Store(Path("/nowhere"), 0))

    def make(self, candidate: Candidate) -> Environment:
        return Environment(python="python", freeze={"moving": candidate.name})

    def release(self, environment: Environment) -> None:
        """It stays."""


class Drawn(Bisection):
    """Judges by chance in place of processes."""

    first_bad: int
    rate: float
    chance: random.Random

    def _run_once(self, index: int, environment: Environment, number: int) -> Attempt:
        fails = index >= self.first_bad and self.chance.random() < self.rate
        verdict = "bad" if fails else "good"
        return Attempt(code=int(fails), timed_out=False, seconds=0.0, verdict=verdict, log="", reason=verdict)  # type: ignore[arg-type]

    def _save(self) -> None:
        """A simulation is not resumed."""


def state_of(options: Options, candidates: int = 10) -> State:
    """A bisect of which nothing is known, over 1.0, 1.1 and so on."""
    question = Question(options=options, command=("true",), folder="/")
    return State(question=question, candidates=[Candidate(name=f"1.{minor}") for minor in range(candidates)])


@dataclass
class Outcome:
    """Of one simulated bisect that was not refused."""

    right: bool
    stated: float | None
    kind: str
    runs: int
    again: int
    told: list[str]


def bisect(rate: float, repeat: int, seed: int, confirm: int = 400) -> Outcome | None:
    """None where the bad end passed each time."""
    chance = random.Random(f"{rate} {repeat} {seed}")
    options = Options(
        good="1.0", bad=f"1.{CANDIDATES - 1}", package="moving", repeat=repeat, probe="none", confirm=confirm
    )
    state = state_of(options, CANDIDATES)
    state.resolved = True
    bisection = Drawn(state, Path("/nowhere"), Anything(), Silent(), 0, True)
    bisection.first_bad, bisection.rate, bisection.chance = chance.randrange(1, CANDIDATES), rate, chance
    try:
        answer = bisection.run()
    except WrongQuestion as error:
        assert "it fails too rarely for --repeat" in str(error)
        return None
    runs = sum(len(record.attempts) for record in state.records)
    right = len(answer.edges) == 1 and answer.edges[0].after == bisection.first_bad
    assert answer == answer_of(state)
    return Outcome(right, confidence(state), answer.kind, runs, runs_spent(state), sentences(state, answer))


def check(rate: float, repeat: int, bisects: int, tolerance: float) -> str:
    """What is said to be sure is right as often as is said. Returns a row of a table."""
    found = [outcome for seed in range(bisects) if (outcome := bisect(rate, repeat, seed))]
    told = [outcome for outcome in found if outcome.stated is not None]
    right = sum(outcome.right for outcome in told) / len(told)
    stated = sum(outcome.stated or 0.0 for outcome in told) / len(told)
    sure = [outcome for outcome in told if outcome.kind == "found"]
    wrong = sum(not outcome.right for outcome in sure) / max(1, len(sure))
    assert all((outcome.stated or 0.0) >= 0.95 for outcome in sure)
    assert all((outcome.stated or 1.0) < 0.95 for outcome in told if outcome.kind == "probable")
    row = (
        f"| {rate:.0%} | {repeat} | {bisects - len(found)} | {len(found) - len(told)} | {right:.1%} of {len(told)} | {stated:.1%}"
        f" | {len(sure)} | {wrong:.1%} | {sum(each.runs for each in found) / len(found):.0f} |"
    )
    print(row)
    assert abs(stated - right) <= tolerance, row
    assert wrong <= 0.05 + tolerance / 3, row
    return row


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5])
def test_what_is_said_to_be_sure_is_as_right_as_is_said(rate: float) -> None:
    check(rate, repeat=8, bisects=120, tolerance=0.04)


@pytest.mark.long
@pytest.mark.parametrize("repeat", [4, 8, 16])
@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5])
def test_three_hundred_bisects_of_each_rate(rate: float, repeat: int) -> None:
    check(rate, repeat, bisects=300, tolerance=0.03)


def test_without_runs_to_confirm_it_is_probable() -> None:
    found = [outcome for seed in range(60) if (outcome := bisect(0.25, 4, seed, confirm=0))]
    probable = [outcome for outcome in found if outcome.kind == "probable"]
    assert len(probable) > len(found) / 2 and all(outcome.again == 0 for outcome in found)
    told = " ".join(probable[0].told)
    assert "is probably" in told and "less than --confidence 0.95: more --repeat or --confirm" in told
    sure = bisect(0.5, 16, 1)
    assert sure and sure.kind == "found" and "probably" not in " ".join(sure.told)


class Watching(Drawn):
    """Notes whether an environment is being made while it runs."""

    disturbed = False

    def _run_once(self, index: int, environment: Environment, number: int) -> Attempt:
        time.sleep(0.02)
        self.disturbed |= any(not future.done() for future in self._installs.values())
        made = super()._run_once(index, environment, number)
        made.value = float(made.code)
        return made


class Slow(Anything):
    """Environments that take a moment."""

    def make(self, candidate: Candidate) -> Environment:
        time.sleep(0.1)
        return super().make(candidate)


@pytest.mark.parametrize("metric", ["", "step_seconds"])
def test_nothing_is_installed_while_a_run_is_measured(metric: str) -> None:
    options = Options(
        good="1.0", bad="1.9", package="moving", probe="none", metric=metric, above=0.5 if metric else None
    )
    state = state_of(options)
    bisection = Watching(state, Path("/nowhere"), Slow(), Silent(), 0, True)
    bisection.first_bad, bisection.rate, bisection.chance = 4, 1.0, random.Random(0)
    assert bisection.run().edges[0].after == 4
    assert bisection.disturbed == (not metric)
