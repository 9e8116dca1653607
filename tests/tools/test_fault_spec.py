"""Faults as the command line says them: what is understood, and what is refused in one sentence."""

import pytest

from harness.config.layers import ConfigError
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kil@sync", "kil is not a kind; the nearest is kill"),
        ("kill@sinc", "sinc is not a phase; the nearest is sync"),
        ("kill", "write KIND@PHASE, KIND@PHASE:RANK or KIND@PHASE:RANK:STEP, such as kill@sync:1:2"),
        ("kill@sync:x", "write KIND@PHASE, KIND@PHASE:RANK or KIND@PHASE:RANK:STEP, such as kill@sync:1:2"),
        ("kill@sync:1:-2", "write KIND@PHASE, KIND@PHASE:RANK or KIND@PHASE:RANK:STEP, such as kill@sync:1:2"),
        ("nan-gradient@sync", "nan-gradient cannot happen in sync, only in update_actor or update_critic"),
        (
            "full-disk@meet",
            "before the ranks have met there is no run directory, and no host knows another; use a later phase",
        ),
        ("kill@shutdown:0:1", "shutdown does not belong to a step; leave the step out"),
        ("kill@sync:2", "the mesh has the ranks 0 to 1"),
        ("kill@sync:1:9", "the steps are 0 to 2, and 3 is the final check"),
    ],
)
def test_a_mistake_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([QUICKSTART, "--inject", text])
    assert str(caught.value) == f'run.inject = "{text}" cannot work: {said}.'


def test_what_the_config_lacks_cannot_be_hurt() -> None:
    with pytest.raises(ConfigError, match='run.inject = "nan-gradient@update_critic" cannot work: .*has no critic'):
        parse([QUICKSTART, "--inject", "nan-gradient@update_critic", "--algorithm.advantage", "grpo"])
    with pytest.raises(
        ConfigError, match='"lost-message@sync" cannot work: weights.transport = "disk" sends no such messages'
    ):
        parse([QUICKSTART, "--inject", "lost-message@sync", "--weights.transport", "disk"])


def test_faults_may_be_given_more_than_once_and_in_a_file() -> None:
    both = parse([QUICKSTART, "--inject", "kill@sync:1", "--inject=hang@values"]).config
    assert both.run.inject == ("kill@sync:1", "hang@values")
    assert parse([QUICKSTART, "--run.inject", "kill@sync:1,hang@values"]).config.run.inject == both.run.inject
