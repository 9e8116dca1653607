"""What needs no engine: planning, saving, and what is refused before an engine sees it. The engine here only takes notes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from harness.config import schema
from harness.config.layers import ConfigError
from harness.task.tiny_models import tiny_config, tiny_model
from harness.weights.names import checkpoint_layout
from harness.weights.presync_checks import WeightsRefused
from harness.weights.stream.slots import Region
from harness.weights.stream.weight_link import WeightLink
from harness.weights.sync import WeightSync
from harness.weights.transports import choose_transport
from harness.weights.worker.reader import LoadCoverage


class Notes:
    """In place of a VerlEngine: what it was sent."""

    device_type = "cpu"

    def __init__(self, **lacks: Any) -> None:
        has = {"version": "0.5.20", "custom_weight_loader": True, "bucket_mixes_dtypes": True}
        self.api = SimpleNamespace(**(has | {"distributed_update_parameters": ()} | lacks))
        self.calls: list[tuple[dict[str, torch.Tensor], bool]] = []
        self.sessions = 0

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        self.sessions += 1
        yield

    def update_weights_from_tensor(
        self, tensors: list[tuple[str, torch.Tensor]], load_format: str | None = None, flush_cache: bool = True
    ) -> None:
        self.calls.append(({name: tensor.clone() for name, tensor in tensors}, flush_cache))


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """This process is the only rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(model: torch.nn.Module, folder: Path, engine: Any = None, **weights: Any) -> tuple[WeightSync, Notes]:
    engine = engine or Notes()
    config = schema.Weights(**weights)
    choose_transport(schema.Config(weights=config), engine.api, "cpu")
    return WeightSync(engine, model, config, folder), engine


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_what_is_saved_is_a_checkpoint_even_if_the_source_is_in_shards(name: str, tmp_path: Path) -> None:
    model = tiny_model(tiny_config(name), seed=1)
    tiny_model(tiny_config(name), seed=2).save_pretrained(tmp_path / "source", max_shard_size="100KB")
    assert (tmp_path / "source" / "model.safetensors.index.json").exists()
    sync, _ = make(model, tmp_path, bucket_size_mib=1)
    sync.save(tmp_path / "saved", tmp_path / "source", rank=0)
    assert {file.name for file in (tmp_path / "saved").iterdir()} >= {"config.json", "model.safetensors"}
    assert not list((tmp_path / "saved").glob("*.index.json"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded[key], tensor), key


def test_a_source_that_is_a_hub_id_gives_the_weights_alone_and_only_on_rank_0(tmp_path: Path) -> None:
    sync, _ = make(tiny_model(tiny_config("qwen2"), seed=1), tmp_path)
    sync.save(tmp_path / "other", Path("Qwen/Qwen2.5-0.5B"), rank=1)
    assert not (tmp_path / "other").exists()
    sync.save(tmp_path / "saved", Path("Qwen/Qwen2.5-0.5B"), rank=0)
    assert [file.name for file in (tmp_path / "saved").iterdir()] == ["model.safetensors"]


def test_the_plan_covers_the_model_in_buckets_of_the_configured_size(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("qwen2"), seed=1)
    sync, _ = make(model, tmp_path, bucket_size_mib=1)
    assert sync.nbytes == sum(parameter.nbytes for parameter in model.parameters())
    assert sync.transport_name == "bucket"
    assert sync.parts() == {}
    sync.close()


def test_a_transport_that_this_sglang_lacks_is_refused(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("qwen2"), seed=1)
    with pytest.raises(ConfigError, match='weights.transport = "stream" cannot work: sglang 0.5.20 has no custom'):
        make(model, tmp_path, Notes(custom_weight_loader=False), transport="stream")
    assert make(model, tmp_path, Notes(bucket_mixes_dtypes=False))[0].transport_name == "tensor"


def test_a_push_sends_every_tensor_once_under_its_checkpoint_name_and_flushes_last(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("qwen3_moe"), seed=1)
    sync, engine = make(model, tmp_path, transport="tensor", bucket_size_mib=1, verify="off")
    sync.save(tmp_path / "saved", tmp_path, rank=0)
    sync.push()
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "saved" / "model.safetensors")
    sent = [pair for tensors, _ in engine.calls for pair in tensors.items()]
    assert sorted(name for name, _ in sent) == sorted(saved)
    assert all(torch.equal(saved[name], tensor) for name, tensor in sent)
    assert [flush for _, flush in engine.calls] == [False] * (len(sync.buckets) - 1) + [True]
    assert engine.sessions == 1


@pytest.mark.parametrize("transport", ["tensor", "bucket"])
def test_parameters_are_sent_in_the_engine_s_dtype_and_buffers_in_their_own(transport: Any, tmp_path: Path) -> None:
    model = tiny_model(tiny_config("deepseek_v3"), seed=1)
    engine: Any = Notes()
    config = schema.Weights(transport=transport, bucket_size_mib=1, verify="off")
    sync = WeightSync(engine, model, config, tmp_path, torch.bfloat16)
    sync.push()
    sync.save(tmp_path / "saved", tmp_path, rank=0)
    saved = AutoModelForCausalLM.from_config(tiny_config("deepseek_v3"), dtype=torch.bfloat16)
    live, sent = model.state_dict(), {name: each for tensors, _ in engine.calls for name, each in tensors.items()}
    assert {tensor.dtype for tensor in live.values()} == {torch.float32}
    from safetensors.torch import load_file

    on_disk = load_file(tmp_path / "saved" / "model.safetensors")
    assert on_disk.keys() == sent.keys() and all(torch.equal(on_disk[name], tensor) for name, tensor in sent.items())
    wide = [name for name, tensor in sent.items() if tensor.dtype != torch.bfloat16]
    assert wide == [name for name in sent if name.endswith("e_score_correction_bias")] != []
    for name in live.keys() & sent.keys():
        assert torch.equal(sent[name], live[name].to(sent[name].dtype)), name
    assert sync.nbytes == sum(parameter.numel() * 2 for parameter in saved.parameters()) + sum(
        sent[name].nbytes for name in wide
    )


class Asked:
    """In place of an open WeightLink: what the schedulers said."""

    broken = False

    def __init__(self, arrival: LoadCoverage) -> None:
        self.coverage = (arrival,)
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def taking_all(sync: WeightSync) -> LoadCoverage:
    """Every entry, copied as it is."""
    regions = [
        [
            Region(
                name=entry.name,
                dtype=entry.dtype,
                shape=entry.shape,
                stride=entry.stride,
                offset=entry.offset // 4,
                target_dtype=entry.dtype,
            )
            for entry in bucket.entries
        ]
        for bucket in sync.buckets
    ]
    return LoadCoverage(rank=0, regions=regions)


def test_what_cannot_arrive_is_refused_at_every_push_and_nothing_is_sent(tmp_path: Path) -> None:
    sync, engine = make(tiny_model(tiny_config("qwen2"), seed=1), tmp_path, transport="tensor")
    arrival = taking_all(sync)
    arrival.regions[-1] = [each for each in arrival.regions[-1] if each.name != "model.norm.weight"]
    arrival.unknown = ["model.norm.weight"]
    for _ in range(2):
        sync._link = Asked(arrival)  # type: ignore[assignment]
        with pytest.raises(WeightsRefused, match="^model.norm.weight: the engine knows no such parameter"):
            sync.push()
    assert engine.calls == [] and engine.sessions == 0


def test_the_schedulers_are_asked_once_and_their_slots_given_back_before_the_first_bucket(tmp_path: Path) -> None:
    sync, engine = make(tiny_model(tiny_config("qwen2"), seed=1), tmp_path, transport="tensor")
    asked = Asked(taking_all(sync))
    sync._link = asked  # type: ignore[assignment]
    sync.push()
    sync.push()
    assert asked.closed == 1 and engine.sessions == 2


def test_a_link_that_broke_is_closed_and_another_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, _ = make(tiny_model(tiny_config("qwen2"), seed=1), tmp_path)
    links = [Asked(taking_all(sync)) for _ in range(2)]
    opening = iter(links)
    monkeypatch.setattr(WeightLink, "open", lambda *_: next(opening))
    assert sync.link() is links[0] and sync.link() is links[0]
    links[0].broken = True
    assert sync.link() is links[1]
    assert [link.closed for link in links] == [1, 0]


def test_a_plan_that_leaves_an_expert_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_one(*given: Any) -> list[Any]:
        return [tensor for tensor in checkpoint_layout(*given) if ".experts.1." not in tensor.name]

    monkeypatch.setattr("harness.weights.sync.checkpoint_layout", without_one)
    with pytest.raises(WeightsRefused, match=r"^model.layers.0.mlp.experts.\w+: the checkpoint's tensors hold "):
        make(tiny_model(tiny_config("qwen3_moe"), seed=1), tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_before_the_engine_sees_it(value: float, tmp_path: Path) -> None:
    model = tiny_model(tiny_config("qwen2"), seed=1)
    sync, engine = make(model, tmp_path, Notes(custom_weight_loader=False), transport="tensor")
    model.get_parameter("model.norm.weight").data[3] = value
    with pytest.raises(WeightsRefused, match=r"^1 tensor\(s\) hold a NaN or an infinity: model.norm.weight \(rank 0\)"):
        sync.push()
    assert engine.calls == [] and engine.sessions == 0
    model.get_parameter("model.norm.weight").data[3] = 1.0
    sync.push()
    assert engine.sessions == 1
