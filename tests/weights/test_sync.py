"""A WeightSync from a small model to engines in this process: what is sent, saved, and refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from harness.task.tiny_models import tiny_config, tiny_model
from harness.weights.converter import CheckpointConverter
from harness.weights.presync_checks import WeightsRefused
from harness.weights.sent_model import SentModel
from harness.weights.sync import WeightSync
from harness.weights.tensor_view import TensorView
from tests.weights.toy_model import Holder, InProcessEngine

pytestmark = pytest.mark.usefixtures("alone")


class Notes(InProcessEngine):
    """An engine that keeps what it was sent, and cannot be asked what it holds."""

    can_ask = False

    def __init__(self) -> None:
        super().__init__(None)
        self.calls: list[tuple[dict[str, torch.Tensor], bool]] = []

    def update_weights_from_tensor(self, named: Any, load_format: str | None = None, flush_cache: bool = True) -> None:
        self.calls.append(({name: tensor.clone() for name, tensor in named}, flush_cache))


def make(model: torch.nn.Module, **changes: Any) -> tuple[WeightSync, Notes]:
    engine: Any = Notes()
    return WeightSync(engine, SentModel.plain(model), **changes), engine


def in_process(model: torch.nn.Module, holder: Holder, **changes: Any) -> tuple[WeightSync, InProcessEngine]:
    engine: Any = InProcessEngine(holder)
    return WeightSync(engine, SentModel.plain(model), **changes), engine


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_what_is_saved_is_a_checkpoint_even_if_the_source_is_in_shards(name: str, tmp_path: Path) -> None:
    model = tiny_model(tiny_config(name), seed=1)
    tiny_model(tiny_config(name), seed=2).save_pretrained(tmp_path / "source", max_shard_size="100KB")
    assert (tmp_path / "source" / "model.safetensors.index.json").exists()
    sync, _ = make(model, bucket_size_mib=1)
    sync.save(tmp_path / "saved", tmp_path / "source")
    assert {file.name for file in (tmp_path / "saved").iterdir()} >= {"config.json", "model.safetensors"}
    assert not list((tmp_path / "saved").glob("*.index.json"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded[key], tensor), key


def test_a_source_that_is_a_hub_id_gives_the_weights_alone(tmp_path: Path) -> None:
    sync, _ = make(tiny_model(tiny_config("qwen2"), seed=1))
    sync.save(tmp_path / "saved", Path("Qwen/Qwen2.5-0.5B"))
    assert [file.name for file in (tmp_path / "saved").iterdir()] == ["model.safetensors"]


def test_a_sync_sends_every_tensor_once_under_its_checkpoint_name_and_flushes_last(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("qwen3_moe"), seed=1)
    sync, engine = make(model, bucket_size_mib=1)
    sync.save(tmp_path / "saved", tmp_path)
    sync.update_engine()
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    sent = [pair for tensors, _ in engine.calls for pair in tensors.items()]
    assert sorted(name for name, _ in sent) == sorted(saved)
    assert all(torch.equal(saved[name], tensor) for name, tensor in sent)
    assert [flush for _, flush in engine.calls] == [False] * (len(sync.weights.buckets) - 1) + [True]
    assert engine.sessions == 1
    assert sync.weights.nbytes == sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("transport", ["tensor", "bucket"])
def test_parameters_are_sent_in_the_engine_s_dtype_and_buffers_in_their_own(transport: Any, tmp_path: Path) -> None:
    model = tiny_model(tiny_config("deepseek_v3"), seed=1)
    engine: Any = Notes()
    sent_as = SentModel.plain(model, torch.bfloat16)
    sync = WeightSync(engine, sent_as, transport=transport)
    sync.update_engine()
    sync.save(tmp_path / "saved", tmp_path)
    live, sent = model.state_dict(), {name: each for tensors, _ in engine.calls for name, each in tensors.items()}
    assert {tensor.dtype for tensor in live.values()} == {torch.float32}
    on_disk = load_file(tmp_path / "saved" / "model.safetensors")
    assert on_disk.keys() == sent.keys() and all(torch.equal(on_disk[name], tensor) for name, tensor in sent.items())
    wide = [name for name, tensor in sent.items() if tensor.dtype != torch.bfloat16]
    assert wide == [name for name in sent if name.endswith("e_score_correction_bias")] != []
    for name in live.keys() & sent.keys():
        assert torch.equal(sent[name], live[name].to(sent[name].dtype)), name


def test_what_cannot_arrive_is_refused_at_every_sync_and_nothing_is_sent() -> None:
    model = tiny_model(tiny_config("qwen2"), seed=1)
    lacking = {name: tensor for name, tensor in model.state_dict().items() if name != "model.norm.weight"}
    sync, _ = in_process(model, Holder(lacking))
    for _ in range(2):
        with pytest.raises(WeightsRefused, match="^model.norm.weight: the engine knows no such parameter"):
            sync.update_engine()
    assert not any(parameter.any() for parameter in sync.engine.model.parameters())  # type: ignore[attr-defined]


def test_the_schedulers_trace_their_loaders_once_and_only_for_checks() -> None:
    model = tiny_model(tiny_config("qwen2"), seed=1)
    for check, asked in ((True, ["cover"]), (False, [])):
        sync, engine = in_process(model, Holder(model.state_dict()), check=check)
        sync.update_engine()
        sync.update_engine()
        assert engine.asked == asked


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_pull_keeps_the_trainers_memory_open_unless_it_is_offloaded_between_syncs(offloaded: bool) -> None:
    model = tiny_model(tiny_config("qwen2"), seed=1)
    held = Holder(model.state_dict())
    sync, engine = in_process(model, held, transport="pull", offloaded=offloaded)
    for each in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(each)
        sync.update_engine()
        for name, tensor in model.state_dict().items():
            assert torch.equal(held.get_parameter(name), tensor), name
    opened = ["plan", "prepare"]
    again = ["release", *opened, "pull", "release"] if offloaded else ["pull"]
    assert engine.asked == ["cover", *opened, "pull", *again]
    assert engine.flushes == 2, "after each pull"
    sync.close()
    sync.close()
    assert engine.asked.count("release") == (2 if offloaded else 1)


class WithoutAnExpert(CheckpointConverter):
    """Forgets one expert."""

    def layout(self) -> tuple[TensorView, ...]:
        return tuple(view for view in super().layout() if ".experts.1." not in view.name)


def test_a_layout_that_leaves_an_expert_out_is_refused() -> None:
    model = tiny_model(tiny_config("qwen3_moe"), seed=1)
    with pytest.raises(WeightsRefused, match=r"^model.layers.0.mlp.experts.\w+: the checkpoint's tensors hold "):
        WeightSync(Notes(), SentModel(model, WithoutAnExpert(model)))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_before_the_engine_sees_it(value: float) -> None:
    model = tiny_model(tiny_config("qwen2"), seed=1)
    sync, engine = make(model)
    model.get_parameter("model.norm.weight").data[3] = value
    with pytest.raises(WeightsRefused, match=r"^1 tensor\(s\) hold a NaN or an infinity: model.norm.weight \(rank 0\)"):
        sync.update_engine()
    assert engine.calls == [] and engine.sessions == 0
    model.get_parameter("model.norm.weight").data[3] = 1.0
    sync.update_engine()
    assert engine.sessions == 1


class Counting:
    """A Transport that a user wrote."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def send(self, weights: Any) -> None:
        self.sent.append(weights.nbytes)

    def close(self) -> None:
        self.sent.append(-1)


def test_a_transport_of_one_s_own_takes_part_without_a_change_elsewhere() -> None:
    transport = Counting()
    sync, _ = make(tiny_model(tiny_config("qwen2"), seed=1), transport=transport)
    sync.update_engine()
    sync.close()
    assert transport.sent == [sync.weights.nbytes, -1]
