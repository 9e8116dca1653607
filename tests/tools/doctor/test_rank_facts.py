import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.cluster.world import Launch
from harness.config.schema import Config, Model
from harness.tools.doctor import rank_facts
from harness.tools.doctor.rank_facts import collect, room

LAUNCH = Launch(rank=0, world_size=1, local_rank=0, local_world_size=1)
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_a_rank_tells_everything_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    found = collect(Config(), LAUNCH, os.environ)
    assert found.problem == "" and found.location and found.location.rank == 0
    assert found.route == "127.0.0.1"
    assert found.versions["torch"] and found.versions["python"].startswith("3.")
    assert found.shared_memory > 0 and all(found.folders.values()) and found.open_files != 0
    assert (found.gpu is None) == bool(found.gpu_reason)


def test_secrets_leave_the_host_redacted() -> None:
    seen = collect(Config(), LAUNCH, TORCHRUN | {"SGLANG_API_KEY": "abc", "SGLANG_X": "/x", "HOME": "/y"}).environment
    assert "abc" not in seen["SGLANG_API_KEY"] and seen["SGLANG_X"] == "/x" and "HOME" not in seen


def test_a_folder_that_is_not_there_has_no_room() -> None:
    assert room("/nonexistent") == 0


def test_absent_is_what_may_be_a_path_and_is_not_there(tmp_path: Path) -> None:
    config = Config(model=Model(name=str(tmp_path)))
    config.task.source = ("openai/gsm8k",)
    assert collect(config, LAUNCH, TORCHRUN).absent == ("task.source = openai/gsm8k",)
    assert collect(Config(), LAUNCH, TORCHRUN).absent == ()


def test_every_folder_that_a_run_writes_and_file_that_it_reads_is_looked_at(tmp_path: Path) -> None:
    config = Config(model=Model(name="~/m"))
    config.run.dir, config.weights.folder = "/proc/nope", str(tmp_path / "new")
    config.checkpoint.every, config.checkpoint.folder = 1, "/proc/nope2"
    config.validation.source, config.task.reward = ("/nope/val.parquet",), "/nope/r.py:f"
    found = collect(config, LAUNCH, TORCHRUN)
    full = [name for name, free in found.folders.items() if not free]
    assert full == ["run.dir = /proc/nope", "checkpoint.folder = /proc/nope2"]
    assert f"weights.folder = {tmp_path / 'new'}" in found.folders
    absent = ("model.name = ~/m", "task.reward = /nope/r.py", "validation.source = /nope/val.parquet")
    assert found.absent == absent, "no other command takes ~ for the home"


def test_a_name_that_does_not_resolve_is_said() -> None:
    found = collect(Config(), LAUNCH, TORCHRUN | {"MASTER_ADDR": "no-such-host.invalid"})
    assert found.route is None and found.master


@pytest.mark.parametrize("has_nvml", [True, False])
def test_a_gpus_memory_is_what_nvml_says_or_torch(has_nvml: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def used(device: torch.device) -> int:
        if has_nvml:
            return 40
        raise ModuleNotFoundError("no pynvml")

    properties = SimpleNamespace(total_memory=100, uuid="0", name="NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device_memory_used", used)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    gpu, reason = rank_facts.look_at_gpu(torch.device("cuda", 0))
    assert gpu == rank_facts.Gpu(uuid="GPU-0", name="NVIDIA H200", total=100, free=60)
    assert reason == ("" if has_nvml else "no pynvml")
