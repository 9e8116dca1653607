"""How long a phase may take."""

from harness.runtime.phases import RUN
from harness.tools.watchdog.client import deadline


def test_the_deadline_of_a_phase() -> None:
    assert deadline("sync", {"sync": 7}, 600) == 7
    assert deadline("generate", {"sync": 7}, 600) == 600
    assert deadline(RUN, {}, 600) is None
    assert deadline(RUN, {RUN: 9}, 600) == 9
