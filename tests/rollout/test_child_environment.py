"""The environment of an engine's processes, and that this process's own is as before."""

import os

import pytest

from harness.rollout.engine_settings import TORCHRUN_VARIABLES, child_environment, engine_environment


def environment() -> dict[str, str]:
    """os.environ, but for what pytest changes between a fixture and its test."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@pytest.fixture
def torchrun_environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """os.environ as torchrun makes it, whole."""
    for name in (*TORCHRUN_VARIABLES, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "KEPT", "CHANGED"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("ADDED", raising=False)
    return environment()


def test_a_child_sees_no_torchrun_and_the_changes(torchrun_environment: dict[str, str]) -> None:
    with child_environment({"ADDED": "2", "CHANGED": "2", "KEPT": None, "NEVER_SET": None, "RANK": "7"}):
        assert not [name for name in os.environ if name.startswith("TORCHELASTIC_")]
        assert [name for name in TORCHRUN_VARIABLES if name in os.environ] == ["RANK"]
        assert (os.environ["ADDED"], os.environ["CHANGED"], os.environ["RANK"]) == ("2", "2", "7")
        assert "KEPT" not in os.environ
    assert environment() == torchrun_environment


def test_what_the_body_did_to_the_environment_is_undone(torchrun_environment: dict[str, str]) -> None:
    with child_environment({"ADDED": "2"}):
        os.environ["OF_THE_BODY"] = "3"
        os.environ["CHANGED"] = "3"
        os.environ["WORLD_SIZE"] = "3"
        del os.environ["ADDED"], os.environ["KEPT"]
    assert environment() == torchrun_environment
    assert os.popen("echo $CHANGED$OF_THE_BODY$WORLD_SIZE").read() == "11\n"  # children see it too


def test_the_environment_is_restored_after_an_exception(torchrun_environment: dict[str, str]) -> None:
    with pytest.raises(RuntimeError), child_environment({"ADDED": "2"}):
        raise RuntimeError
    assert environment() == torchrun_environment


def test_a_change_that_cannot_be_made_leaves_the_environment_as_it_was(torchrun_environment: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="null byte"), child_environment({"ADDED": "2", "CHANGED": "a\0b"}):
        pass
    assert environment() == torchrun_environment


def test_an_engines_environment_is_made_without_changing_this_one(torchrun_environment: dict[str, str]) -> None:
    made = engine_environment(torchrun_environment, {"ADDED": "2", "KEPT": None, "RANK": "7"})
    assert {"ADDED": "2", "CHANGED": "1", "RANK": "7"}.items() <= made.items()
    assert not {"KEPT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"} & made.keys()
    assert environment() == torchrun_environment
