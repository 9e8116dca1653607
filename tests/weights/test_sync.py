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
from harness.tools.tiny_models import tiny_config, tiny_model
from harness.weights.groups import SourceView
from harness.weights.names import checkpoint_layout
from harness.weights.presync_checks import WeightsRefused
from harness.weights.sync import WeightSync
from harness.weights.transports import choose_transport
from harness.weights.worker.puller import LoadCoverage
from tests.weights.toy_model import InProcessEngine


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
    sync.close()


def test_a_transport_that_this_sglang_lacks_is_refused(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("qwen2"), seed=1)
    with pytest.raises(ConfigError, match='weights.transport = "pull" cannot work: sglang 0.5.20 has no custom'):
        make(model, tmp_path, Notes(custom_weight_loader=False), transport="pull")
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
    """In place of a PullLink: what the schedulers would say, and how often they were asked."""

    def __init__(self, sync: WeightSync, **changes: Any) -> None:
        """Say that every entry is copied as it is, but for the changes of LoadCoverage."""
        self.groups = sync.link.groups
        copied = [
            [
                SourceView(each.name, each.dtype, each.shape, each.stride, each.offset // 4, each.dtype)
                for each in group.entries
                if each.name not in changes.get("unknown", ())
            ]
            for group in self.groups
        ]
        self.coverage: tuple[LoadCoverage, ...] = ()
        self.answer = LoadCoverage(rank=0, **{"sources": copied} | changes)
        self.done: list[str] = []

    def trace(self) -> None:
        self.done.append("trace")
        self.coverage = (self.answer,)

    def release(self) -> None:
        self.done.append("release")


def asked_by(sync: WeightSync, **changes: Any) -> Asked:
    link: Any = Asked(sync, **changes)
    sync.link = link
    return link


def test_what_cannot_arrive_is_refused_at_every_push_and_nothing_is_sent(tmp_path: Path) -> None:
    sync, engine = make(tiny_model(tiny_config("qwen2"), seed=1), tmp_path, transport="tensor")
    asked_by(sync, unknown=["model.norm.weight"])
    for _ in range(2):
        with pytest.raises(WeightsRefused, match="^model.norm.weight: the engine knows no such parameter"):
            sync.push()
    assert engine.calls == [] and engine.sessions == 0


def test_the_schedulers_trace_their_loaders_once(tmp_path: Path) -> None:
    sync, engine = make(tiny_model(tiny_config("qwen2"), seed=1), tmp_path, transport="tensor")
    asked = asked_by(sync)
    sync.push()
    sync.push()
    assert asked.done == ["trace"] and engine.sessions == 2
    sync.close()
    assert asked.done == ["trace", "release"]


def test_without_verification_no_loader_is_traced(tmp_path: Path) -> None:
    sync, engine = make(tiny_model(tiny_config("qwen2"), seed=1), tmp_path, transport="tensor", verify="off")
    asked = asked_by(sync, unknown=["model.norm.weight"])
    sync.push()
    assert asked.done == [] and engine.sessions == 1


class Holder(torch.nn.Module):
    """An engine's model that holds each tensor under its checkpoint name."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        for name, tensor in model.state_dict().items():
            self.register_parameter(name.replace(".", "/"), torch.nn.Parameter(torch.zeros_like(tensor)))

    def load_weights(self, weights: Any) -> None:
        for name, loaded in weights:
            self.get_parameter(name.replace(".", "/")).data.copy_(loaded)


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_pull_keeps_the_trainers_memory_open_unless_it_is_offloaded_between_syncs(
    offloaded: bool, tmp_path: Path
) -> None:
    model = tiny_model(tiny_config("qwen2"), seed=1)
    held = Holder(model)
    engine: Any = InProcessEngine(held)
    engine.api.bucket_mixes_dtypes, flushes = True, []
    engine.has_prefixes, engine.flush_cache = True, lambda: flushes.append(len(engine.asked))
    sync = WeightSync(engine, model, schema.Weights(transport="pull"), tmp_path, offloaded=offloaded)
    for each in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(each)
        sync.push()
        for name, tensor in model.state_dict().items():
            assert torch.equal(held.get_parameter(name.replace(".", "/")), tensor), name
    opened = ["plan", "prepare"]
    again = ["release", *opened, "pull", "release"] if offloaded else ["pull"]
    assert engine.asked == ["trace", *opened, "pull", *again]
    assert flushes == [4, len(engine.asked) - offloaded], "after each pull, while prefixes may be there"
    engine.has_prefixes = False
    sync.push()
    assert len(flushes) == 2
    sync.close()
    sync.close()
    assert engine.asked.count("release") == (3 if offloaded else 1)


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
