"""Faults as the command line says them: what is understood, and what is refused in one sentence."""

import pytest

from harness.runtime.events import PHASES
from harness.tools.command_line import parse
from harness.tools.fault_spec import AT, KINDS, Fault, parse_fault

QUICKSTART = "configs/cpu/quickstart.toml"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill@sync", Fault(kind="kill", phase="sync")),
        ("kill@sync:1", Fault(kind="kill", phase="sync", rank=1)),
        ("kill@sync:1:2", Fault(kind="kill", phase="sync", rank=1, step=2)),
        ("kill@sync::2", Fault(kind="kill", phase="sync", step=2)),
        ("full-disk@run:3", Fault(kind="full-disk", phase="run", rank=3)),
    ],
)
def test_what_is_understood(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault
    assert parse_fault(str(fault)) == fault


def test_each_kind_has_phases() -> None:
    assert len(KINDS) == 12
    assert set().union(*AT.values()) <= set(PHASES)


def test_faults_may_be_given_more_than_once_and_in_a_file() -> None:
    both = parse([QUICKSTART, "--inject", "kill@sync:1", "--inject=hang@values"]).config
    assert both.run.inject == ("kill@sync:1", "hang@values")
    assert parse([QUICKSTART, "--run.inject", "kill@sync:1,hang@values"]).config.run.inject == both.run.inject
