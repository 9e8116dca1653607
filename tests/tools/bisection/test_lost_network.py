"""A network that is lost in the middle: the project's own Bisection over an index that does not answer for a while."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.tools.bisection import bisection
from harness.tools.bisection.candidates import Candidate
from harness.tools.bisection.installation import Environment, uv_problem
from harness.tools.bisection.question import Options
from harness.tools.bisection.store import Unreachable
from tests.tools.bisection.test_confidence import Anything, Drawn, Silent, state_of


@dataclass
class Telling(Silent):
    """Keeps what it says."""

    said: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.said.append(text)


@dataclass(kw_only=True)
class Losing(Anything):
    """Environments from an index that does not answer the next `losses` times, once `begins` were made."""

    step: str
    begins: int
    losses: int

    def resolve(self, candidate: Candidate) -> None:
        self._ask("resolve")

    def make(self, candidate: Candidate) -> Environment:
        self._ask("make")
        return super().make(candidate)

    def _ask(self, step: str) -> None:
        if step != self.step:
            return
        self.begins -= 1
        if self.begins < 0 < self.losses:
            self.losses -= 1
            raise uv_problem("error: error sending request for url (http://localhost/simple/moving/)")


def bisection_of(provider: Losing) -> tuple[Drawn, Telling]:
    options = Options(good="1.0", bad="1.9", package="moving", probe="none", metric="x", above=0.5)
    show = Telling()
    made = Drawn(state_of(options), Path("/nowhere"), provider, show, 0, True)
    made.first_bad, made.rate, made.chance = 4, 1.0, random.Random(0)
    return made, show


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bisection, "NETWORK_WAITS", (0.01, 0.02))


@pytest.mark.parametrize("step", ["make", "resolve"])
def test_a_short_loss_does_not_end_the_night(step: str) -> None:
    made, show = bisection_of(Losing(step=step, begins=3, losses=2))
    answer = made.run()
    assert answer.kind == "found" and answer.edges[0].after == 4
    assert not made.state.closed
    assert sum("could not be reached" in each and "Trying again in" in each for each in show.said) == 2


@pytest.mark.parametrize("step", ["make", "resolve"])
def test_a_long_one_pauses_with_its_verdicts(step: str) -> None:
    made, show = bisection_of(Losing(step=step, begins=3, losses=1000))
    with pytest.raises(Unreachable, match="could not be reached"):
        made.run()
    assert sum("Trying again in" in each for each in show.said) >= 2
    assert len(made.state.records) == (3 if step == "make" else 0)
