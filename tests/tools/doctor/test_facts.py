import os
from pathlib import Path

import pytest

from harness.cluster.world import Launch
from harness.config.schema import Config, Model
from harness.tools.doctor import facts
from harness.tools.doctor.facts import collect, inputs, space

LAUNCH = Launch(rank=0, world_size=1, local_rank=0, local_world_size=1)
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_a_rank_tells_everything_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    found = collect(Config(), LAUNCH, os.environ)
    assert found.pid == os.getpid() and found.problem == "" and found.location and found.location.rank == 0
    assert found.network.route == "127.0.0.1" and any(
        "127.0.0.1" in each.addresses for each in found.network.interfaces
    )
    assert found.versions["torch"] and found.versions["python"].startswith("3.")
    assert found.shared_memory.total > 0 and found.temp.writable and found.limits["nofile"][0] != 0
    assert (found.gpu is None) == bool(found.gpu_reason)


def test_secrets_leave_the_host_redacted() -> None:
    assert facts.matters("HF_TOKEN") and not facts.matters("HOME")
    seen = collect(Config(), LAUNCH, TORCHRUN | {"HF_TOKEN": "hf_abc", "HF_HOME": "/x"}).environment
    assert "hf_abc" not in seen["HF_TOKEN"] and seen["HF_HOME"] == "/x"


def test_a_folder_that_is_not_there_has_no_room() -> None:
    assert space("/nonexistent") == facts.Space(path="/nonexistent", total=0, free=0, identity=(0, 0), writable=False)


def test_inputs_are_what_may_be_a_path(tmp_path: Path) -> None:
    config = Config(model=Model(name=str(tmp_path)))
    config.task.source = "openai/gsm8k"
    assert [(each.key, each.exists) for each in inputs(config)] == [("model.name", True), ("task.source", False)]
    assert inputs(Config()) == ()


def test_a_name_that_does_not_resolve_is_said() -> None:
    found = facts.host_network({"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "1"})
    assert found.route is None and found.problem
