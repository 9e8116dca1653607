import os
import sys
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


class Nvml:
    """A stand-in for nvidia-ml-py."""

    class NVMLError(Exception):
        pass

    opened = 0

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return 7

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=100, free=60)


def test_a_gpu_is_read_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(rank_facts, "gpu_uuid", lambda index: "GPU-0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    gpu, reason = rank_facts.look_at_gpu(torch.device("cuda", 0))
    assert gpu and reason == "" and library.opened == 0
    assert (gpu.uuid, gpu.name, gpu.total, gpu.free) == ("GPU-0", "NVIDIA H200", 100, 60)


def test_without_nvml_torch_alone_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Nvml()
    monkeypatch.setattr(library, "nvmlInit", lambda: (_ for _ in ()).throw(Nvml.NVMLError("no driver")))
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(rank_facts, "gpu_uuid", lambda index: "GPU-0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    gpu, reason = rank_facts.look_at_gpu(torch.device("cuda", 0))
    assert gpu and (gpu.free, gpu.total) == (60, 100) and reason == "NVML: no driver"
