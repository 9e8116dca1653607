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
from harness.weights.gather import Bucket
from harness.weights.stream.slots import SlotEntry
from harness.weights.transports import DiskTransport, DistributedTransport, choose_transport, split_by_dtype
from tests.cluster.gloo import on_ranks

OLD_RUNNER = (
    "class ModelRunner:\n    def init_weights_update_group(self):\n        dist.barrier(group=g, device_ids=[rank])\n"
)


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
        flattened_bucket=True,
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
    without = replace(new, flattened_bucket=False)
    assert choose_transport(config_of(), without, "cpu") == ("tensor", "auto: sglang 0.9.9 has no flattened buckets")


@pytest.mark.parametrize(
    ("config", "device", "name"),
    [
        (config_of(), "cuda", "bucket"),
        (config_of("stream"), "cuda", "stream"),
        (config_of(implementation="sglang"), "cuda", "tensor"),
        (config_of(colocate=False), "cuda", "distributed"),
        (config_of("disk", False), "cuda", "disk"),
        (config_of("distributed"), "cpu", "distributed"),
        (config_of("bucket"), "cuda", "bucket"),
    ],
)
def test_a_run_takes_what_its_devices_allow(config: schema.Config, device: Any, name: str, new: SGLangApi) -> None:
    assert choose_transport(config, new, device).name == name


@pytest.mark.parametrize(
    ("config", "device", "sentence"),
    [
        (
            config_of("distributed"),
            "cuda",
            'weights.transport = "distributed" cannot work: NCCL refuses two ranks on one GPU, and an engine rank is on'
            " its trainer rank's; use parallel.colocate = false, or another transport.",
        ),
        (
            config_of("bucket", False),
            "cuda",
            'weights.transport = "bucket" cannot work: with parallel.colocate = false the engine does not see the'
            ' trainer\'s GPU, and opens no handle of its memory; use "distributed" or "disk".',
        ),
        (
            config_of("disk", False),
            "cpu",
            "parallel.colocate = false cannot work: on the CPU there are no GPUs to separate; use true.",
        ),
    ],
)
def test_what_auto_makes_of_the_device_is_refused_too(
    config: schema.Config, device: Any, sentence: str, new: SGLangApi
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_transport(config, new, device)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("transport", "absent", "sentence"),
    [
        (
            "stream",
            {"custom_weight_loader": False},
            'weights.transport = "stream" cannot work: sglang 0.9.9 has no custom weight loaders, which came with 0.4.8;'
            ' use "tensor".',
        ),
        (
            "bucket",
            {"flattened_bucket": False},
            'weights.transport = "bucket" cannot work: sglang 0.9.9 has no flattened buckets, which came with 0.5.1; use'
            ' "tensor".',
        ),
        (
            "distributed",
            {"distributed_update_parameters": ()},
            'weights.transport = "distributed" cannot work: sglang 0.9.9 has no update_weights_from_distributed; use'
            ' "tensor".',
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


def test_a_group_that_starts_with_a_barrier_on_other_gpus_is_refused(new: SGLangApi) -> None:
    runner = new.tree.root / "srt/model_executor/model_runner.py"
    runner.parent.mkdir(parents=True)
    runner.write_text(OLD_RUNNER)
    with pytest.raises(ConfigError, match='ends the start of an update group in a barrier .* use "disk"'):
        choose_transport(config_of("distributed", False), new, "cuda")


@dataclass
class OldEngine:
    """Stands for an engine whose api alone is asked: what is refused must be refused before any call."""

    api: SGLangApi


def _bucket(*names: str) -> Bucket:
    entries = tuple(
        SlotEntry(name=name, dtype=torch.float32, shape=(1,), stride=(1,), offset=0, group=0) for name in names
    )
    return Bucket(pieces=(), entries=entries, nbytes=4)


def test_one_tensor_a_call_cannot_carry_what_fuses(new: SGLangApi) -> None:
    engine: Any = OldEngine(replace(new, distributed_update_parameters=("name", "dtype", "shape")))
    attention = "model.layers.0.self_attn"
    bucket = _bucket(f"{attention}.kv_a_proj_with_mqa.weight", f"{attention}.q_a_proj.weight")
    nothing: Any = None
    with pytest.raises(ConfigError, match="receives one tensor a call, and would drop model.layers.0.self_attn.kv_a"):
        DistributedTransport(engine, nothing).push([bucket], nothing)


def test_dtypes_part_in_order_where_a_bucket_holds_one() -> None:
    tensors = [("a", torch.zeros(1)), ("b", torch.zeros(1, dtype=torch.bfloat16)), ("c", torch.ones(2))]
    assert [[name for name, _ in part] for part in split_by_dtype(tensors)] == [["a", "c"], ["b"]]


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
