"""Which transport a run takes, and what the disk transport leaves behind; test_transports_real.py has real engines."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config import schema
from harness.config.layers import ConfigError
from harness.rollout import sglang_api
from harness.rollout.sglang_api import SGLangApi, SourceTree
from harness.weights.transports import DiskTransport, choose_transport
from tests.cluster.gloo import on_ranks


@pytest.fixture
def new(tmp_path: Path) -> SGLangApi:
    """As a release of today, made of an empty source tree."""
    engine = tmp_path / "srt/entrypoints/engine.py"
    engine.parent.mkdir(parents=True)
    engine.write_text("class Engine:\n    def flush_cache(self): ...\n")
    return replace(
        sglang_api.probe(SourceTree(tmp_path)),
        version="0.9.9",
        custom_weight_loader=True,
        bucket_mixes_dtypes=True,
        distributed_update_parameters=("names", "dtypes", "shapes", "group_name", "flush_cache"),
    )


def config_of(transport: Any = "auto", colocate: Any = True, implementation: Any = "harness") -> schema.Config:
    return schema.Config(
        weights=schema.Weights(transport=transport),
        parallel=schema.Parallel(colocate=colocate),
        engine=schema.Engine(implementation=implementation),
    )


def test_auto_is_the_update_call_of_sglang_and_the_reason_is_given(new: SGLangApi) -> None:
    assert choose_transport(config_of(), new, "cpu") == ("bucket", "auto: sglang 0.9.9 takes flattened buckets")
    without = replace(new, bucket_mixes_dtypes=False)
    assert choose_transport(config_of(), without, "cpu") == ("tensor", "auto: sglang 0.9.9 has no flattened buckets")


@pytest.mark.parametrize(
    ("config", "device", "name"),
    [
        (config_of(), "cuda", "bucket"),
        (config_of("pull"), "cuda", "pull"),
        (config_of(implementation="sglang"), "cuda", "tensor"),
        (config_of(colocate=False), "cuda", "distributed"),
        (config_of("disk", False), "cuda", "disk"),
        (config_of("distributed"), "cpu", "distributed"),
        (config_of("bucket"), "cuda", "bucket"),
    ],
)
def test_a_run_takes_what_its_devices_allow(config: schema.Config, device: Any, name: str, new: SGLangApi) -> None:
    assert choose_transport(config, new, device)[0] == name


@pytest.mark.parametrize(
    ("config", "device", "facts"),
    [
        (config_of("distributed"), "cuda", r'transport = "distributed" cannot work: .* use parallel.colocate = false'),
        (config_of("bucket", False), "cuda", r'transport = "bucket" cannot work: .* use "distributed" or "disk"'),
        (config_of("disk", False), "cpu", r"parallel.colocate = false cannot work: .* use true"),
    ],
)
def test_what_auto_makes_of_the_device_is_refused_too(
    config: schema.Config, device: Any, facts: str, new: SGLangApi
) -> None:
    with pytest.raises(ConfigError, match=facts):
        choose_transport(config, new, device)


@pytest.mark.parametrize(
    ("transport", "absent", "sentence"),
    [
        (
            "pull",
            {"custom_weight_loader": False},
            'weights.transport = "pull" cannot work: sglang 0.9.9 has no custom weight loaders, which came with 0.4.8;'
            ' use "tensor".',
        ),
        (
            "bucket",
            {"bucket_mixes_dtypes": False},
            'weights.transport = "bucket" cannot work: sglang 0.9.9 has no flattened buckets of any dtypes, which came with'
            ' 0.5.6; use "tensor".',
        ),
        (
            "distributed",
            {"distributed_update_parameters": ("name", "dtype", "shape")},
            'weights.transport = "distributed" cannot work: sglang 0.9.9 has no broadcasts of several tensors, which came'
            ' with 0.4.9; use "disk".',
        ),
    ],
)
def test_what_a_version_lacks_is_one_sentence(
    transport: Any, absent: dict[str, Any], sentence: str, new: SGLangApi
) -> None:
    config = config_of(transport, transport != "distributed")
    assert choose_transport(config, new, "cuda") == (transport, "set in the config")
    with pytest.raises(ConfigError) as caught:
        choose_transport(config, replace(new, **absent), "cuda")
    assert str(caught.value) == sentence


@dataclass
class LoadingEngine:
    """Stands for an engine that loads from disk: it lists what is there, or fails on one rank."""

    rank: int
    failing: int
    found: tuple[str, ...] = ()

    def update_weights_from_disk(self, path: str) -> None:
        if self.rank == self.failing:
            raise RuntimeError("no such weights")
        self.found = tuple(file.name for file in Path(path).iterdir())


def _push(rank: int, parent: str, failing: int) -> tuple[str, tuple[str, ...], bool]:
    engine: Any = LoadingEngine(rank, failing)

    def save(folder: Path) -> None:
        if rank == 0:
            (folder / "model.safetensors").write_bytes(b"weights")

    outcome = "pushed"
    nothing: Any = None
    try:
        DiskTransport(engine, Path(parent) / "new", save).push((), nothing)
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    torch.distributed.barrier()
    return outcome, engine.found, any((Path(parent) / "new").iterdir())


def test_every_engine_loads_what_rank_0_wrote_and_nothing_is_left(tmp_path: Path) -> None:
    assert on_ranks(_push, 2, tmp_path, str(tmp_path), -1) == [("pushed", ("model.safetensors",), False)] * 2


def test_one_engine_that_cannot_load_fails_every_rank_and_nothing_is_left(tmp_path: Path) -> None:
    told, raised = on_ranks(_push, 2, tmp_path, str(tmp_path), 1)
    assert told[0] == "EngineFailed: loading the checkpoint failed on rank 1: RuntimeError: no such weights"
    assert raised == ("RuntimeError: no such weights", (), False)
    assert told[2] is False
